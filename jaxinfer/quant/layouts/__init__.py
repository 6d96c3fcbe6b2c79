"""How public formats keep quantised weights in a checkpoint's tensors: one file for each."""
