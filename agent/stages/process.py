"""How an engine's process comes to be: forked from the slot's zygote where the mode asks for it and it can be, else
spawned, with the reason."""

from __future__ import annotations

from dataclasses import replace

from relight.agent.engines.base import EngineCommand
from relight.agent.member import Member
from relight.agent.procfs import DEVICES
from relight.agent.stages.common import Tools
from relight.agent.supervisor.client import Running
from relight.core.errors import LocalFault
from relight.core.logs import get_logger
from relight.core.records import Mode

FORKED = "forked"
"""How the line of an engine that was forked begins."""
_log = get_logger("agent.process")


async def begin(member: Member, tools: Tools, command: EngineCommand) -> tuple[Running, str]:
    """The main process, and one line that says how it came to be. Raises what the supervisor raises."""
    marked = replace(command, env={**command.env, DEVICES: ",".join(member.assignment.devices)})
    if member.assignment.mode is Mode.COLD:
        return await tools.spawner.spawn(member.instance, marked, member.log_path), "spawned, as the mode is cold"
    member.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        running, said = await tools.forker.fork(member.assignment.spec.engine, member.instance, marked, member.log_path)
        return running, f"{FORKED} from {said}"
    except LocalFault as error:
        _log.info("process.not-forked", instance=member.instance, reason=str(error))
        running = await tools.spawner.spawn(member.instance, marked, member.log_path)
        return running, f"spawned: {error}"
