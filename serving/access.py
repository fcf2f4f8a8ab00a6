"""Who calls: a tenant with roles. Where no tokens are configured, everyone may do everything.

Knows no wire: a surface hands over what its protocol calls a credential.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from serving.request import RefusedError

# To complete prompts; to change which adapters there are; to look into the server and stop it.
Role = Literal["generate", "adapters", "operator"]
ROLES: frozenset[Role] = frozenset(get_args(Role))


@dataclass(frozen=True)
class Caller:
    """Whose call it is. "": nobody in particular."""

    tenant: str = ""
    roles: frozenset[Role] = ROLES

    def must(self, role: Role) -> None:
        """Refuse what this caller may not do."""
        if role not in self.roles:
            raise RefusedError(
                "PERMISSION_DENIED",
                f"this takes the role {role!r}; {self.tenant!r} has {sorted(self.roles)}",
            )


class Access:
    """Credentials to callers."""

    def caller(self, credential: str | None) -> Caller:
        """Whose credential it is, or a refusal. None: the call came with none."""
        return Caller()
