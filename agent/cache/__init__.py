"""The compile-cache ring: what engines compile, sealed, signed, kept on cache nodes, installed before the next start.

    key       what an artefact depends on, readable, compared field by field (pure); rules: what counts (data)
    trees     which directories an engine leaves, and what of them belongs in a bundle
    bundle    manifest and signature of a sealed tree, and what is refused of one (pure); sealing makes one on disk
    placement which nodes keep a key, and what moves when they change (pure); lease: one compile per key (pure)
    store     one node's disk: quota, last use, quarantine; node serves it, peer asks one, ring asks all of them
    install   staged, verified, renamed; outcome: what the engine then made of it (pure)
    start     the seam: prepare() before an engine starts, finish() when it serves
    archive   a ring's bundles in a directory and back

docs/compile-cache.md walks through it. No failure in here stops a start: without a bundle the engine compiles.
"""
