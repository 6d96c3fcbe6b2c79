"""The version, read by the build and by `jaxinfer --version`."""

__version__ = "0.1.0"
