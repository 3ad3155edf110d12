"""A process that has imported an engine and waits: engines are forked from it instead of being started and importing
for seconds. Standard library only, but for what the engine's own preload module imports.

    python -m relight.plugin.zygote --socket PATH --preload MODULE

It forks on request over a unix socket, one JSON object per line:

    {"describe": {}}                           -> {"pid", "imported_seconds", "resident_bytes", "modules", "models"}
    {"prepare": {"argv", "env", "cwd", "log"}} -> {"prepared": key of the model}, or {"refused", "stale"}
    {"fork": {"argv", "env", "cwd", "log"}}    -> {"pid", "model"} from the child, which then waits for the line `go`,
                                               or {"refused": why, "stale": whether a new zygote would not refuse}

A prepared model is a fork of its own that has also read the model's configuration and tokenizer; engines of the model
are then forked from that one. The child is orphaned at once, so that the subreaper above (the supervisor) becomes its
parent, and goes on only when it is told that somebody answers for it: a caller that dies in between leaves nothing
behind.
"""
