"""docs/custom-services.md says of each script what its own header says."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["begin", "renew", "hand_off", "refuse", "give_back"])
def test_the_contract_has_the_arguments_of(script: str) -> None:
    text = (ROOT / f"services/common/scripts/{script}.lua").read_text()
    comments = [line.removeprefix("-- ") for line in text.splitlines() if line.startswith("-- ")]
    arguments = [line for line in comments if line.startswith(("KEYS", "ARGV"))]
    assert arguments
    contract = (ROOT / "docs/custom-services.md").read_text()
    section = contract.split(f"\n{script}: ")[1].split("```")[1]
    assert section.strip().splitlines() == arguments
