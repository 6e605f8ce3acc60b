"""A trained policy as a file: weights without pickle, and their provenance."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from concord.errors import InputError, first_line
from concord.reinforcement.actor_critic import ActorCritic
from concord.storage import Folder

SHIPPED = Path(__file__).parent / "experts"
_PROVENANCE = "provenance"


@dataclass(frozen=True)
class Expert:
    """A policy to learn from.

    Attributes:
        network: the agent's, in evaluation mode.
        provenance: ``game``, ``difficulty``, ``steps``, the command, hardware and returns of its training.
        version: the first letters of the file's SHA-256.
    """

    network: ActorCritic
    provenance: Mapping[str, Any]
    version: str


def shipped_expert(game: str, difficulty: str) -> Path:
    """The path of the included expert of this game, which exists for some games and difficulties."""
    return SHIPPED / f"{game}-{difficulty}.safetensors"


def save_expert(path: Path, network: nn.Module, provenance: Mapping[str, Any]) -> None:
    """Write weights as float16, which halves the file, with their provenance; replaces the file as a whole."""
    weights = {name: each.detach().cpu().to(torch.float16).contiguous() for name, each in network.state_dict().items()}
    Folder(path.parent).write(path.name, save(weights, {_PROVENANCE: json.dumps(dict(provenance))}))


def load_expert(path: Path, game: str | None = None, difficulty: str | None = None, option: str = "expert") -> Expert:
    """Read an expert, and check its game and difficulty if they are given; ``option`` names the expert in errors."""
    option = f"--{option} {path}"
    if not path.is_file():
        raise InputError(f"{option}: there is no such file; concord train coinrun-expert trains an expert")
    try:
        with safe_open(path, "pt") as file:
            provenance = json.loads((file.metadata() or {}).get(_PROVENANCE, "null"))
            weights: dict[str, Tensor] = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        version = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{option}: cannot be read as safetensors ({first_line(error)})") from error
    if not isinstance(provenance, dict) or not {"game", "difficulty"} <= provenance.keys():
        raise InputError(
            f"{option}: does not say what it was trained on; concord train coinrun-expert makes such files"
        )
    for name, wanted in (("game", game), ("difficulty", difficulty)):
        if wanted is not None and provenance[name] != wanted:
            raise InputError(f"{option}: was trained on {name} {provenance[name]}, not on {wanted}")
    network = ActorCritic()
    expected = {name: value.shape for name, value in network.state_dict().items()}
    if {name: value.shape for name, value in weights.items()} != expected:
        raise InputError(f"{option}: its weights are not those of Concord's network for {provenance['game']}")
    network.load_state_dict(weights)
    return Expert(network.eval(), provenance, version)
