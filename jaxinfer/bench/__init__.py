"""Measuring how fast an engine serves a workload."""
