"""Many replicas of the server as one Ray Serve application; nothing in serving imports it."""
