"""What fits where: memory formulas that need neither JAX nor a device."""
