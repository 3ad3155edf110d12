"""As which slot a pod's agent may attach: as its own alone, by the token that its kubelet gave it."""

from __future__ import annotations

from relight.controller.kubernetes.reviews import Reviews, User
from relight.controller.observe.places import Places
from relight.controller.rpc.guard import SlotCheck
from relight.core.auth import bearer
from relight.core.errors import Denied, Unavailable

AUDIENCE = "relight"
ACCOUNT = "system:serviceaccount:"
POD_NAME = "authentication.kubernetes.io/pod-name"


class PodAgents:
    """Admits agents in slot pods."""

    def __init__(self, reviews: Reviews, places: Places) -> None:
        self._reviews, self._places = reviews, places

    async def __call__(self, authorization: str | None) -> SlotCheck:
        """What slots may be checked with. Raises Denied for who is no service account, Unavailable."""
        user = await self._reviews.user(bearer(authorization), AUDIENCE)
        own = slot_name(user)

        def check(slot: str) -> None:
            if not (slot.endswith(own) if own.startswith(".") else slot == own):
                raise Denied(f"{user.name} may attach as {own}, not as {slot}", authenticated=True)
            if not self._places.of(slot).pool:
                # Its pod may have been made a moment ago; a pod that no pool has is told so for ever.
                raise Unavailable(f"{slot} is no slot pod of a DevicePool")

        return check


def slot_name(user: User) -> str:
    """The slot that a token was made for; `.namespace` where the server does not say of which pod it is.

    Raises Denied for who is no service account.
    """
    namespace, _, account = user.name.removeprefix(ACCOUNT).partition(":")
    if not user.name.startswith(ACCOUNT) or not namespace or not account:
        raise Denied(f"{user.name} is no service account", authenticated=True)
    return f"{user.told(POD_NAME)}.{namespace}"
