"""The time limit of a sweep, and the measurements that it skips."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic


@dataclass
class Budget:
    """The seconds of a sweep; ``left_out`` collects skipped measurements."""

    deadline_s: float
    left_out: list[str]
    prompt_s_per_token: float = 0.0

    @classmethod
    def of(cls, limit_s: float, left_out: list[str]) -> Budget:
        """Start now."""
        return cls(monotonic() + limit_s, left_out)

    def allows(self, what: str, *, prompt_tokens: int = 0) -> bool:
        """Return whether there is time for a measurement; if not, record that it is skipped."""
        wanted_s = prompt_tokens * self.prompt_s_per_token
        if monotonic() + wanted_s < self.deadline_s:
            return True
        self.left_out.append(f"{what}: the time limit")
        return False

    def allows_pages(self, what: str, tokens_left: int) -> bool:
        """Return whether the engine's pages fit the sequences and the tokens that they emit."""
        if tokens_left:
            return True
        self.left_out.append(f"{what}: too few cache pages")
        return False

    def took_up(self, prompt_tokens: int, time_s: float) -> None:
        """Learn the time of prompts."""
        self.prompt_s_per_token = max(self.prompt_s_per_token, time_s / prompt_tokens)
