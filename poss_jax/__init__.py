"""poss_jax: lossless speculative decoding with position specialists, as pure functions on arrays.

Nothing in this package reads a file, prints or keeps state: `train`, `infer` and `convert` do that.
Shape letters used in every docstring, comment and einsum of the project:

    b  batch row                 k  key/value head            h  hidden size
    t  query row (token, node)   g  query head of a KV head   i  intermediate size of the MLP
    s  key row (cache slot)      d  size of a head            v  vocabulary
"""
