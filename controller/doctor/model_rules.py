"""What is seen of a model that could be better: each function is a rule of rules.toml, and returns its evidence or "".

Pure, and silent about what is not known.
"""

from __future__ import annotations

import re

from relight.controller.doctor.arguments import unknown_flags
from relight.controller.doctor.case import ModelCase
from relight.core.records import Mode

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PUBLISHED_RESIDUAL = 2 << 30
"""Bytes that a sleeping engine kept of one device in published measurements (0.8 to 2.4 GiB): until one is measured."""
GRAPH_SIZES = 60
"""vLLM captures 51 sizes by default (1, 2, 4, then every 8 up to 256, every 16 up to 512)."""
SLOW_SERVER_SECONDS = 5.0
BIG_BLOCK = 128
FEW_SEQUENCES = 8
_FALSE = ("", "0", "false", "no")
_NAMED = re.compile(r"(?<![a-z])(awq|gptq|gguf|bnb|bitsandbytes)(?![a-z])", re.IGNORECASE)
_SAME = {"bnb": "bitsandbytes", "awq_marlin": "awq", "gptq_marlin": "gptq"}


def _vllm(case: ModelCase) -> bool:
    return case.engine == "vllm"


def prefix_caching_off(case: ModelCase) -> str:
    # The vendor's own recipes for Kunlun switch it off, and nobody has said that it works there.
    if not _vllm(case) or case.kind == "kunlun" or case.arguments.on("enable-prefix-caching") is not False:
        return ""
    return "--no-enable-prefix-caching"


def eager_mode(case: ModelCase) -> str:
    return "--enforce-eager" if _vllm(case) and case.arguments.on("enforce-eager") else ""


def graphs_off(case: ModelCase) -> str:
    config = case.arguments.config("--compilation-config")
    mode = str(config.get("cudagraph_mode", "")).upper()
    if _vllm(case) and case.kind != "cpu" and mode == "NONE":
        return f"cudagraph_mode {config['cudagraph_mode']}"
    return ""


def all_graphs_at_start(case: ModelCase) -> str:
    # Left to choose, Relight takes the lazy way where there is one.
    if not _vllm(case) or case.mode in (Mode.LAZY, Mode.AUTO) or case.kind == "cpu":
        return ""
    arguments = case.arguments
    sizes = arguments.config("--compilation-config").get("cudagraph_capture_sizes")
    count = len(sizes) if isinstance(sizes, list) else 0
    largest = next(
        (
            n
            for n in map(arguments.number, ("--max-cudagraph-capture-size", "--cuda-graph-sizes"))
            if n is not None and n > 512
        ),
        0.0,
    )
    if largest:
        count = max(count, 35 + int((largest - 256) // 16))
    return f"about {count} sizes of graphs, captured before the first request" if count > GRAPH_SIZES else ""


def big_blocks(case: ModelCase) -> str:
    size = case.arguments.number("--block-size")
    if not _vllm(case) or case.kind == "kunlun" or size is None or size < BIG_BLOCK:
        return ""
    return f"--block-size {size:.0f}: half a block of each request, {size / 2:.0f} tokens, is held and never used"


def few_sequences(case: ModelCase) -> str:
    most = case.arguments.number("--max-num-seqs")
    if not _vllm(case) or most is None or most > FEW_SEQUENCES:
        return ""
    return f"--max-num-seqs {most:.0f}: request {most + 1:.0f} waits however much KV cache is free"


def batch_below_context(case: ModelCase) -> str:
    arguments = case.arguments
    batch, length = arguments.number("--max-num-batched-tokens"), arguments.number("--max-model-len")
    chunked = arguments.on("enable-chunked-prefill")
    if not _vllm(case) or chunked is not False or batch is None or length is None or batch >= length:
        return ""
    return f"--max-num-batched-tokens {batch:.0f} below --max-model-len {length:.0f}, and prompts are not cut in pieces"


def prompts_whole(case: ModelCase) -> str:
    # Recipes for Kunlun switch it off as well.
    if not _vllm(case) or case.kind == "kunlun" or case.arguments.on("enable-chunked-prefill") is not False:
        return ""
    return "--no-enable-chunked-prefill"


def quantisation_and_format(case: ModelCase) -> str:
    if not _vllm(case):
        return ""
    arguments = case.arguments
    method, form = (arguments.text("--quantization") or "").lower(), (arguments.text("--load-format") or "").lower()
    if form in ("bitsandbytes", "gguf") and method not in (form, ""):
        return f"--load-format {form} with --quantization {method}"
    if method in ("bitsandbytes", "gguf") and form not in (method, "auto", ""):
        return f"--quantization {method} with --load-format {form}"
    named = _NAMED.search(case.uri.rpartition("/")[2])
    saved = _SAME.get(named[1].lower(), named[1].lower()) if named else ""
    if saved and method and _SAME.get(method, method) != saved:
        return f"--quantization {method}, and the name of {case.uri} says {saved}"
    return ""


def dummy_weights(case: ModelCase) -> str:
    return "--load-format dummy" if case.arguments.text("--load-format") == "dummy" else ""


def caches_off(case: ModelCase) -> str:
    for name in ("VLLM_DISABLE_COMPILE_CACHE", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"):
        if case.env.get(name, "").lower() not in _FALSE:
            return f"{name}={case.env[name]}"
    return "no cache node runs where it starts" if case.ring is False and case.engine in ("vllm", "sglang") else ""


def cache_key_by_accident(case: ModelCase) -> str:
    told = [
        f"{name}={case.env[name]}"
        for name in ("VLLM_PLUGINS", "USER", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
        if name in case.env and case.env[name] != "nobind"
    ]
    if case.uri.endswith("/") or "/./" in case.uri or "//" in case.uri.partition("://")[2 if "://" in case.uri else 0]:
        told.append(f"the model's path as written, {case.uri}")
    record = case.start.cache if case.start else None
    if record is not None and record.compiled and record.changed:
        told.append("the last start compiled again for want of " + ", ".join(record.changed[:3]))
    return "; ".join(told) if _vllm(case) else ""


def memory_beside_guardians(case: ModelCase) -> str:
    share = case.arguments.number("--gpu-memory-utilization")
    if not _vllm(case) or not case.beside or not case.device_bytes or case.kind == "cpu":
        return ""
    share = 0.9 if share is None else share
    each = PUBLISHED_RESIDUAL if case.residual_bytes is None else case.residual_bytes
    room = 1 - case.beside * each / case.device_bytes
    if share <= room:
        return ""
    how = "as published of others" if case.residual_bytes is None else "as measured"
    told = (
        f"{case.beside} that sleep beside it keep {case.beside * each >> 20} MiB of {case.device_bytes >> 20} ({how})"
    )
    return f"--gpu-memory-utilization {share:g}, and {told}: at most {room:.2f} fits"


def profiles_beside_others(case: ModelCase) -> str:
    if not _vllm(case) or not case.beside or case.kind in ("", "cpu"):
        return ""
    if "--kv-cache-memory-bytes" in case.arguments or "--num-gpu-blocks-override" in case.arguments:
        return ""
    return "no --kv-cache-memory-bytes on a device with others"


def control_routes_open(case: ModelCase) -> str:
    if case.env.get("VLLM_SERVER_DEV_MODE", "").lower() in _FALSE:
        return ""
    told = case.arguments.text("--host")
    listens = case.listens if told is None else told
    if listens is None or listens in LOOPBACK:
        return ""
    key = ", which --api-key does not cover" if "--api-key" in case.arguments else ""
    return f"VLLM_SERVER_DEV_MODE={case.env['VLLM_SERVER_DEV_MODE']} on {listens or 'all addresses'}{key}"


def secret_on_command_line(case: ModelCase) -> str:
    for name in ("--api-key", "--admin-api-key", "--hf-token"):
        value = case.arguments.text(name)
        # What clients send where no key is asked for is no secret.
        if value and value.lower() != "empty" and not value.startswith("$"):
            return f"{name} is written out: whoever lists processes or pods reads it"
    return ""


def foreign_code(case: ModelCase) -> str:
    if not case.arguments.on("trust-remote-code") or case.uri.startswith(("/", "file:")):
        return ""
    return f"--trust-remote-code with {case.uri or 'a model from elsewhere'}"


def slow_tokenizer(case: ModelCase) -> str:
    if case.arguments.text("--tokenizer-mode") == "slow":
        return "--tokenizer-mode slow"
    if case.start is None or case.start.seconds <= 0:
        return ""
    took = sum(p.end - p.start for p in case.start.phases if p.name == "serve")
    if took < SLOW_SERVER_SECONDS or took < 0.3 * case.start.seconds:
        return ""
    return f"{took:.1f} of {case.start.seconds:.1f} s of the last start passed between the model and the first answer"


def image_not_there(case: ModelCase) -> str:
    if not case.image:
        return ""
    tag = case.image.rpartition("/")[2].partition(":")[2]
    if "@sha256:" not in case.image and tag in ("", "latest"):
        return f"{case.image} has no version: it is asked for at each start, and may be another each time"
    return f"imagePullPolicy Always for {case.image}" if case.pull_policy == "Always" else ""


def flags_that_do_not_exist(case: ModelCase) -> str:
    found = unknown_flags(case.arguments, case.engine, case.version)
    told = [f"{flag} ({INSTEAD[flag]})" if flag in INSTEAD else flag for flag in found]
    return f"{case.engine} {case.version} knows no {', '.join(told)}" if told else ""


INSTEAD = {
    "--swap-space": "KV cache is never swapped any more: leave it out",
    "--disable-log-requests": "requests are not logged unless --enable-log-requests says so",
    "--cuda-graph-sizes": "--cudagraph-capture-sizes or --max-cudagraph-capture-size",
    "--max-seq-len-to-capture": "--max-cudagraph-capture-size",
    "--use-v2-block-manager": "there is one: leave it out",
    "--num-scheduler-steps": "--async-scheduling",
    "--guided-decoding-backend": "--structured-outputs-config",
    "--rope-scaling": "--hf-overrides",
    "--task": "--runner",
    "--device": "the platform is found out",
    "--speculative-model": "--speculative-config",
    "--num-speculative-tokens": "--speculative-config",
    "--num-lookahead-slots": "--speculative-config",
    "--preemption-mode": "recomputing is all there is: leave it out",
    "--worker-use-ray": "--distributed-executor-backend ray",
}
"""What took the place of flags that guides still recommend."""


def tensor_parallel_over_hosts(case: ModelCase) -> str:
    ranks = case.arguments.number("--tensor-parallel-size")
    if ranks is None or ranks <= case.devices or case.devices < 2:
        return ""
    return f"--tensor-parallel-size {ranks:.0f} over hosts of {case.devices} devices"


def visible_devices_contradict(case: ModelCase) -> str:
    names = ("CUDA_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES")
    told = {name: case.env[name] for name in names if name in case.env}
    if case.mode is not None and told:
        return ", ".join(f"{n}={v}" for n, v in told.items()) + ": Relight says which devices an engine has"
    if len(set(told.values())) > 1:
        return ", ".join(f"{n}={v}" for n, v in told.items())
    return ""


def rdma_forbidden(case: ModelCase) -> str:
    value = case.env.get("NCCL_IB_DISABLE", "")
    if value.lower() not in _FALSE:
        return f"NCCL_IB_DISABLE={value}"
    used = case.env.get("BKCL_USE_RDMA")
    return f"BKCL_USE_RDMA={used}" if used is not None and used in ("0", "") else ""


def no_slot_of_its_versions(case: ModelCase) -> str:
    return case.locked
