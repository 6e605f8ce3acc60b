"""Columns of text as inputs of a table's network: the mean of the token vectors of a Hugging Face encoder.

A frozen encoder computes a vector of each text once, and keeps them in this machine's cache, by the texts and the
encoder. One that is trained gets tokens, and is a part of the network. Weights are read from safetensors alone, and no
code of a model's repository runs.
"""

import copy
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from concord.environments.table_encoder import TextTokens, as_texts
from concord.errors import ArgumentError, InputError, first_line
from concord.extras import require_extra
from concord.storage.cache import cache_folder

_AT_ONCE = 64  # texts


@dataclass(frozen=True)
class TextModel:
    """An encoder of texts.

    Attributes:
        encoder: maps ``input_ids`` and ``attention_mask`` to an output with ``last_hidden_state``.
        tokens: of the columns.
        width: of a text's vector.
        digest: of weights and tokenizer.
    """

    encoder: nn.Module
    tokens: TextTokens
    width: int
    digest: str


@dataclass(frozen=True, eq=False)
class TextInputs:
    """The columns of text of a table.

    Attributes:
        model: the encoder.
        train: whether it is trained with the network.
        frame: all rows.
    """

    model: TextModel
    train: bool
    frame: pd.DataFrame

    @property
    def width(self) -> int:
        """Of a row's vectors."""
        return self.model.width * len(self.model.tokens.columns)

    def vectors(self, rows: pd.DataFrame) -> NDArray[np.float32]:
        """The vectors of some rows, by a frozen encoder, ``(rows, width)``; NaN for a missing text."""
        found: NDArray[np.float32] = self._vectors[self.frame.index.get_indexer(rows.index)]
        return found

    @functools.cached_property
    def _vectors(self) -> NDArray[np.float32]:
        columns = []
        for name in self.model.tokens.columns:
            codes, texts = pd.factorize(as_texts(self.frame[name]))
            missing = np.full((1, self.model.width), np.nan, dtype=np.float32)  # of the code -1
            columns.append(np.concatenate([_cached_vectors(self.model, list(texts)), missing])[codes])
        return np.concatenate(columns, axis=1)

    def network(self, network: nn.Module, numeric: int, scale: "tuple[Any, Any] | None" = None) -> nn.Module:
        """The network behind the encoder, for rows with tokens; vectors are scaled if they were in training."""
        return TextNetwork(copy.deepcopy(self.model.encoder), network, numeric, self.model.tokens, scale)


class TextNetwork(nn.Module):
    """A table's network behind an encoder of texts.

    Args:
        encoder: of texts.
        network: takes numbers, vectors, codes.
        numeric: the number of inputs before the tokens.
        tokens: of the columns.
        scale: mean and factor of the vectors, each ``(width,)``; None leaves them.

    Input ``(batch, numeric + tokens + categories)``, where the tokens of a column end with -1; output as the network's.
    The vector of a text without a token is 0.
    """

    mean: Tensor
    factor: Tensor

    def __init__(
        self, encoder: nn.Module, network: nn.Module, numeric: int, tokens: TextTokens, scale: "tuple[Any, Any] | None"
    ) -> None:
        super().__init__()
        self.encoder, self.network = encoder, network
        self.numeric, self.end = numeric, numeric + tokens.width
        self.texts = len(tokens.columns), tokens.length
        mean, factor = (0.0, 1.0) if scale is None else scale
        self.register_buffer("mean", torch.as_tensor(mean, dtype=torch.float32))
        self.register_buffer("factor", torch.as_tensor(factor, dtype=torch.float32))

    def forward(self, rows: Tensor) -> Tensor:
        """The network's outputs."""
        tokens = rows[:, self.numeric : self.end].unflatten(1, self.texts).flatten(0, 1)
        vectors = pooled(self.encoder, tokens).unflatten(0, (-1, self.texts[0]))
        scaled = ((vectors.flatten(1) - self.mean) * self.factor).view_as(vectors)
        known = (tokens >= 0).any(1).view(-1, self.texts[0], 1)
        vectors = (scaled * known).flatten(1)
        outputs: Tensor = self.network(torch.cat([rows[:, : self.numeric], vectors, rows[:, self.end :]], 1))
        return outputs


def pooled(encoder: nn.Module, tokens: Tensor) -> Tensor:
    """The mean vector of each text's tokens ``(texts, tokens)``, of which -1 are none; ``(texts, width)``."""
    known = tokens >= 0
    states = encoder(input_ids=tokens.clamp(min=0).long(), attention_mask=known.long()).last_hidden_state
    weights = known.to(states.dtype).unsqueeze(2)
    mean: Tensor = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
    return mean


@functools.lru_cache(maxsize=2)
def load_text_model(reference: str, columns: tuple[str, ...], length: int) -> TextModel:
    """The encoder in a local folder, or of this name on the hub, for these columns.

    Raises:
        InputError: transformers is not installed, or the model cannot be loaded or is no encoder.
    """
    require_extra("text", "--text")
    folder = Path(os.path.expanduser(reference))
    local = folder.is_dir()
    where: dict[str, Any] = {"trust_remote_code": False, "local_files_only": local}
    try:
        with _quietly():
            from transformers import AutoModel, AutoTokenizer

            name = str(folder) if local else reference
            tokenizer = AutoTokenizer.from_pretrained(name, **where)
            # The eager attention has second derivatives, which objectives need, and is exported.
            encoder = AutoModel.from_pretrained(name, use_safetensors=True, attn_implementation="eager", **where)
    except Exception as error:  # of many kinds, of the network, the files, and what is in them
        right = "give a folder with config.json, model.safetensors and tokenizer.json, or a name on the hub"
        raise ArgumentError("text_model", reference, f"cannot be loaded ({first_line(error)}); {right}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ArgumentError("text_model", reference, "has no tokenizer.json; save a fast tokenizer beside the model")
    encoder.pooler = None  # of the first token, unused
    known = tokenizer.backend_tokenizer
    known.no_padding()
    known.no_truncation()
    tokens = TextTokens(columns, known.to_str(), min(length, tokenizer.model_max_length))
    try:
        with torch.no_grad():
            found = pooled(encoder.eval(), torch.from_numpy(tokens.of_texts(["a text"])))
    except Exception as error:
        problem = f"is no encoder that gives a vector for each token ({first_line(error)})"
        raise ArgumentError("text_model", reference, f"{problem}; give one such as BERT") from error
    digest = hashlib.sha256(tokens.tokenizer.encode())
    for each, value in encoder.state_dict().items():
        digest.update(each.encode() + value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return TextModel(encoder, tokens, found.shape[1], digest.hexdigest()[:16])


@contextmanager
def _quietly() -> Iterator[None]:
    """Without progress bars and warnings of transformers, and with the caller's random numbers."""
    from transformers.utils import logging as own_logging

    logging: Any = own_logging  # untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _cached_vectors(model: TextModel, texts: Sequence[str]) -> NDArray[np.float32]:
    """The vectors of texts, from the cache if they are there."""
    key = hashlib.sha256(f"{model.digest} {model.tokens.length} ".encode() + "\0".join(texts).encode()).hexdigest()
    file = cache_folder("text") / f"{key}.npy"
    try:
        found: NDArray[np.float32] = np.load(file, allow_pickle=False)
    except (OSError, ValueError):  # missing, or damaged
        found = _vectors(model, texts)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as written:
            np.save(written, found)
        os.replace(written.name, file)
    if found.shape != (len(texts), model.width):
        raise InputError(f"{file}: is not what was written; remove it")
    return found


@torch.no_grad()
def _vectors(model: TextModel, texts: Sequence[str]) -> NDArray[np.float32]:
    tokens = torch.from_numpy(model.tokens.of_texts(texts))
    counts = (tokens >= 0).sum(1)
    order = counts.argsort(stable=True)  # texts of about the same length share a batch
    found = torch.empty(len(texts), model.width)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder = copy.deepcopy(model.encoder).to(device)
    for places in order.split(_AT_ONCE):
        longest = max(int(counts[places].max()), 1)
        found[places] = pooled(encoder, tokens[places, :longest].to(device)).float().cpu()
    found[counts == 0] = torch.nan  # as a missing text, also in TextNetwork
    return found.numpy()
