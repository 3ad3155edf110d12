"""`make test-rdma`: the verbs path for real, on soft-RoCE between two emulated machines; judges what they found.

The last line of the output is JSON: verified_bytes, bytes_per_nic, paths, failures_handled.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guest import BODY, CARDS, INTERFACES, MARK

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import rdma_vm  # noqa: E402 - scripts/ is no package

SECONDS = 300
"""For all of it; a machine that takes longer is ended."""
MEMORY_MIB = 1024
MTU = 4096
"""What a card puts into one packet, above an interface with frames of 9000 bytes."""


@dataclass
class Machine:
    """One emulated machine: what it found, and its last lines for when something went wrong."""

    role: str
    process: subprocess.Popen[str]
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.rstrip()
            if MARK in text:
                said = json.loads(text[text.index(MARK) + len(MARK) :])
                self.found[said["step"]] = said
            self.lines.append(text)


def start(role: str, number: int, links: list[socket.socket], made: Path) -> Machine:
    """Starts one machine; `links` are its ends of the wires between the two."""
    command, environment = rdma_vm.emulator(made)
    program = ROOT / "tests" / "rdma" / "guest.py"
    words = [f"relight.python={ROOT}/.venv/bin/python", f"relight.program={program}", f"relight.role={role}"]
    # Nested machines rarely have a KVM that boots a stock kernel, and results must not depend on it: emulation.
    command += [
        "-M", "q35,accel=tcg", "-cpu", "max", "-smp", "1", "-m", str(MEMORY_MIB), "-nodefaults", "-no-user-config",
        "-display", "none", "-no-reboot", "-serial", "stdio",
        "-kernel", str(made / "vmlinuz"), "-initrd", str(made / "initrd"),
        "-append", " ".join(["console=ttyS0 quiet panic=-1 mitigations=off", *words]),
    ]  # fmt: skip
    for tag, path in (("machine", "/"), ("unpacked", str(made / "root"))):
        command += [
            "-fsdev", f"local,id={tag},path={path},security_model=none,readonly=on,multidevs=remap",
            "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}",
        ]  # fmt: skip
    for n, link in enumerate(links):
        command += [
            "-netdev", f"socket,id=n{n},fd={link.fileno()}",
            "-device", f"virtio-net-pci,netdev=n{n},romfile=,mac=52:54:00:77:{n:02x}:{number:02x}",
        ]  # fmt: skip
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        pass_fds=[link.fileno() for link in links], text=True, errors="replace",
    )  # fmt: skip
    for link in links:
        link.close()
    return Machine(role, process)


def run(made: Path) -> list[Machine]:
    """Both machines from power-on to the receiver's end."""
    wires = [socket.socketpair() for _ in INTERFACES]
    machines = [
        start(role, number + 1, [wire[number] for wire in wires], made)
        for number, role in enumerate(("source", "receiver"))
    ]
    try:
        listeners = [threading.Thread(target=m.listen, daemon=True) for m in machines]
        for listener in listeners:
            listener.start()
        until = time.monotonic() + SECONDS
        listeners[1].join(timeout=max(until - time.monotonic(), 0))
        listeners[0].join(timeout=10)
    finally:
        for machine in machines:
            machine.process.kill()
            machine.process.wait(timeout=10)
    return machines


class Judge:
    """What has to be true of what the receiver found."""

    def __init__(self, found: dict[str, dict[str, Any]]) -> None:
        self._found = found
        self.wrong: list[str] = []
        self.verified = 0
        self.per_nic = dict.fromkeys(CARDS, 0)
        self.handled: list[str] = []

    def check(self, true: bool, otherwise: str) -> bool:
        if not true:
            self.wrong.append(otherwise)
        return true

    def step(self, name: str) -> dict[str, Any]:
        if self.check(name in self._found, f"{name}: did not come to an end"):
            return self._found[name]
        return {}

    def session(self, name: str) -> dict[str, Any]:
        """A verified refill: every byte is the source's, and those of the cards were counted by the cards."""
        step = self.step(name)
        if not step:
            return step
        if self.check(step["same"] and step["bytes"] == BODY, f"{name}: other bytes than the source's"):
            self.verified += step["bytes"]
        for card in CARDS:
            completed, counted = step["completed"][card], step["counters"][card]
            self.per_nic[card] += completed
            placed = step["holders"][f"i-source by {card}"]
            self.check(completed >= placed, f"{name}: {card} completed {completed} bytes of {placed} that were placed")
            least = min(counted["interface_bytes"], counted["packets"] * MTU)
            self.check(least >= completed, f"{name}: {card} counted {counted} for {completed} bytes read")
        return step

    def judge(self) -> None:
        for name in ("both", "renewed"):
            if step := self.session(name):
                self.check(not step["lost"], f"{name}: lost {step['lost']}")
                self.check(all(step["completed"].values()), f"{name}: a card brought nothing: {step['completed']}")
        self._member()
        self._relay()
        if stale := self.step("stale"):
            old, new = stale["keys"]
            self.check(old != new, f"stale: the key stayed {old}")
            self.check(stale["asleep"] == {"cut": 0, "resident": 0}, f"stale: asleep with {stale['asleep']}")
            if self.check("not signed for this source" in stale["refused"], f"stale: grant: {stale['refused']!r}"):
                self.handled.append("stale grant")
            self._refused("stale", stale["old_key"], "stale key")
        if wrong := self.step("wrong-key"):
            self._refused("wrong-key", wrong, "wrong key")
        self._failover()

    def _member(self) -> None:
        """A member of an engine woke over both cards that its agent found by itself."""
        if not (step := self.step("member")):
            return
        self.check(len(step["cards"]) == len(CARDS), f"member: the agent found {step['cards']}")
        self.check(not step["closed"], f"member: closed {step['closed']}")
        if self.check(step["same"] and step["bytes"] == BODY, "member: other bytes than the source's"):
            self.verified += step["bytes"]
        for card in CARDS:
            told = f"member: {card} brought nothing: {step['counters'][card]}, {step['detail']}"
            self.check(step["counters"][card]["interface_bytes"] > BODY // 4, told)

    def _relay(self) -> None:
        """What that member was filled with went on out of the same registered memory, by its cards alone."""
        if step := self.step("relay"):
            if self.check(step["same"], "relay: other bytes than the source's"):
                self.verified += sum(step["brought"].values())
            self.check(step["brought"] == {"i-receiver": BODY}, f"relay: {step['brought']}, {step['detail']}")

    def _refused(self, step: str, said: dict[str, Any], what: str) -> None:
        named = "the key does not open that memory" in said["why"]
        if self.check(named and said["completed"] == 0 and said["untouched"], f"{step}: {what}: {said}"):
            self.handled.append(what)

    def _failover(self) -> None:
        step, downs = self.session("failover"), self.step("downs")
        if not step or not downs:
            return
        lost, holders = step["lost"], step["holders"]
        self.check(len(downs["downs"]) == 2, f"failover: links went down {len(downs['downs'])} times")
        before, after = downs["findings"]
        told = [f.partition(",")[0] for f in after]
        self.check(not before and told == [f"{c}: port 1 is DOWN" for c in CARDS], f"preflight: {before}, then {after}")
        half = step["bytes"] // 2
        if self.check(
            bool(lost.get("i-source by rxe0")) and holders["i-source by rxe1"] > half,
            f"failover: the other card did not take over: {holders}, lost {lost}",
        ):
            self.handled.append("other NIC")
        if self.check(
            bool(lost.get("i-source by rxe1")) and holders["i-source by tcp"] > 0,
            f"failover: TCP did not take over: {holders}, lost {lost}",
        ):
            self.handled.append("TCP")

    def paths(self) -> list[str]:
        """By which ways verified bytes came, in the order in which they took over."""
        holders = self._found.get("failover", {}).get("holders", {})
        return [name.removeprefix("i-source by ") for name, count in holders.items() if count]


def show(found: dict[str, dict[str, Any]]) -> None:
    print(f"{'step':<10} {'seconds':>8}  {'bytes by path'}")
    for step in found.values():
        if "holders" in step:
            by = ", ".join(f"{name.removeprefix('i-source by ')} {count}" for name, count in step["holders"].items())
            print(f"{step['step']:<10} {step['seconds']:>8}  {by}")
            print(f"{'':<20} completed {step['completed']}, counters {step['counters']}")
            for name, why in step["lost"].items():
                print(f"{'':<20} lost {name}: {why}")
    for finding in found.get("downs", {}).get("findings", [[], []])[1]:
        print(f"source's preflight then: {finding}")
    if "member" in found:
        print(f"member     {found['member']['detail']}; cards {', '.join(found['member']['cards'])}")
    if "stale" in found:
        print(f"stale grant: {found['stale']['refused']}\nstale key: {found['stale']['old_key']['why']}")
    if "wrong-key" in found:
        print(f"wrong key: {found['wrong-key']['why']}")


def main() -> int:
    if any(c.isspace() for c in str(ROOT)):
        raise SystemExit(f"test-rdma: the checkout's path must have no space: {ROOT}")
    begun = time.monotonic()
    source, receiver = run(ROOT / ".cache" / "rdma-vm")
    judge = Judge(receiver.found)
    judge.judge()
    show(receiver.found)
    if judge.wrong or judge.verified < BODY:
        for machine in (source, receiver):
            print(f"---- {machine.role}, last lines\n" + "\n".join(machine.lines[-40:]))
        for wrong in judge.wrong:
            print(f"WRONG {wrong}")
    print(f"both machines took {time.monotonic() - begun:.1f} s; handled: {', '.join(judge.handled)}")
    print(
        json.dumps(
            {
                "verified_bytes": judge.verified,
                "bytes_per_nic": judge.per_nic,
                "paths": judge.paths(),
                "failures_handled": len(judge.handled),
            }
        )
    )
    return 1 if judge.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
