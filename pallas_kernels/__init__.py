"""Attention and cache kernels over a paged KV pool, usable without jaxinfer.

Every operation is a package: ``api`` (documentation, checks, choice of implementation), ``reference`` (plain jax.numpy,
the specification) and one module an implementation. `dispatch` chooses among them for the current device; `kv_format`
says how pools hold keys and values. Depends on jax alone.
"""
