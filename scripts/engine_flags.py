"""Writes which flags one version of an engine takes, as its own argument parser says, for the doctor.

    .venv-engine/bin/python scripts/engine_flags.py vllm

Run by the interpreter of an engine's environment, once for each version that the doctor shall know.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "controller" / "doctor" / "flags"


def vllm() -> set[str]:
    """Of `vllm serve`, with the forms that deny and shorten."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return set(make_arg_parser(FlexibleArgumentParser())._option_string_actions)


def sglang() -> set[str]:
    """Of `python -m sglang.launch_server`."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return set(parser._option_string_actions)


def main() -> int:
    """Exit status 2 for an engine that is not known here."""
    readers = {"vllm": vllm, "sglang": sglang}
    if len(sys.argv) != 2 or sys.argv[1] not in readers:
        print(f"usage: engine_flags.py {'|'.join(readers)}", file=sys.stderr)
        return 2
    engine = sys.argv[1]
    number = version(engine).partition("+")[0]
    file = FOLDER / f"{engine}-{number}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(sorted(readers[engine]())) + "\n")
    print(f"{file}: {len(file.read_text().splitlines())} flags")
    return 0


if __name__ == "__main__":
    sys.exit(main())
