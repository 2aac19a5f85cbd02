"""How long a sweep may take, and what it had no time for."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic


@dataclass
class Budget:
    """Seconds that a sweep may take; ``left_out`` collects what it had no time for."""

    deadline_s: float
    left_out: list[str]
    prompt_s_per_token: float = 0.0

    @classmethod
    def of(cls, limit_s: float, left_out: list[str]) -> Budget:
        """Starts now."""
        return cls(monotonic() + limit_s, left_out)

    def allows(self, what: str, *, prompt_tokens: int = 0) -> bool:
        """Whether there is time for it; if not, it is left out."""
        wanted_s = prompt_tokens * self.prompt_s_per_token
        if monotonic() + wanted_s < self.deadline_s:
            return True
        self.left_out.append(f"{what}: the time limit")
        return False

    def allows_pages(self, what: str, tokens_left: int) -> bool:
        """Whether the engine's pages hold the sequences, with tokens to emit behind them."""
        if tokens_left:
            return True
        self.left_out.append(f"{what}: too few cache pages")
        return False

    def took_up(self, prompt_tokens: int, time_s: float) -> None:
        """Learns how long prompts take."""
        self.prompt_s_per_token = max(self.prompt_s_per_token, time_s / prompt_tokens)
