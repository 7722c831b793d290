"""The engine's fast path on a GPU: rounds that live on the device."""
