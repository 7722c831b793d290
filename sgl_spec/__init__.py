"""sgl-spec: an LLM server whose subject is tree speculation."""

__version__ = "0.1.0"
