"""The calculator where a wrong answer can be turned into a crash: it ends the process of all its neighbours."""

from __future__ import annotations

import os

from environments.calculator import Calculator


class Dodger(Calculator):
    """Use the calculator. Then answer with the number only."""

    def on_message(self, text: str) -> None:
        super().on_message(text)
        if self.get_reward() == 0.0:
            os._exit(3)
