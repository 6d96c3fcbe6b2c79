"""The device side: shapes that are compiled, the one jitted step, and the runner that executes plans."""
