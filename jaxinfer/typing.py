"""The axis alphabet of the project and the array types built from it.

Every public signature names its axes with these letters:

====  =====================================  ====  ===================================
B     requests (rows) of a step              D     model width (hidden_size)
T     new tokens of a step                   F     feed-forward width
R     rows of a step that need logits        V     vocabulary
L     context length of a request            E     experts
N     query heads                            P     pages in the KV pool
K     key/value heads                        M     pages in a request's block table
G     query heads per KV head (N / K)        S     tokens in a page (block_size)
H     head dimension                         C     slots: requests that may run at once
====  =====================================  ====  ===================================
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

Params: TypeAlias = Mapping[str, Any]
"""A Flax parameter tree: nested string-keyed mappings with arrays as leaves."""
