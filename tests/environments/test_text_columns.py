"""Columns of text: tokens, vectors of a frozen encoder, an encoder that is trained, and registered models."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from concord.analysis.consistency.network import Settings
from concord.cli import main
from concord.environments import text_model
from concord.environments.table import TableEnvironments, from_table
from concord.environments.table_encoder import TableEncoder
from concord.environments.text_model import TextInputs, TextNetwork, load_text_model, pooled
from concord.errors import InputError
from concord.execution.analyzing_columns import table_columns
from concord.execution.preflight import preflight
from concord.execution.trained_model import TrainedModel
from concord.tracking import Store
from concord.tracking.exported_model import load_predictor, log_model
from concord.training import ProcessContext, Silent, load_job, train

GOOD, BAD = (
    ["calm and well", "sleeps well at home", "no pain today"],
    ["much pain", "fever and cough", "short of breath"],
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a BERT of two layers, with a tokenizer of the words here."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([*GOOD, *BAD], trainers.WordPieceTrainer(vocab_size=80, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **names).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=80, max_position_embeddings=32, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("CONCORD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "text"


def patients(count: int = 30) -> pd.DataFrame:
    """Rows of four hospitals, of which the note tells who died."""
    draw = np.random.default_rng(0)
    total = 4 * count
    died = draw.integers(0, 2, total)
    note = [
        f"{draw.choice(BAD if ill else GOOD)} {draw.choice(['today', 'now', 'again'])} {row}"
        for row, ill in enumerate(died)
    ]
    frame = pd.DataFrame({"hospital": np.repeat(["east", "north", "south", "west"], count), "note": note, "died": died})
    frame["age"], frame["sex"] = draw.normal(size=total), draw.choice(["m", "f"], total)
    frame.loc[3, "note"] = None
    return frame


def environments(tiny: Path, frame: pd.DataFrame | None = None, **more: Any) -> TableEnvironments:
    given = {"target": "died", "environment": "hospital", "test": ["west"], "text": ["note"], "text_length": 12, **more}
    return from_table(patients() if frame is None else frame, text_model=str(tiny), **given)


def config_of(tiny: Path, tmp_path: Path, **more: Any) -> Any:
    patients().to_csv(tmp_path / "p.csv", index=False)
    where = {"data": tmp_path / "p.csv", "environment": "hospital", "target": "died", "test": ("west",)}
    text = {"text": ("note",), "text_model": str(tiny), "text_length": 12, "epochs": 2, "hidden_units": 8}
    return load_job("table").job.config.with_options(**{**where, **text, **more})


def test_a_vector_is_the_mean_of_the_tokens_of_transformers_own_model(tiny: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    texts = ["much pain", "calm and well today", ""]
    tokenizer, model = AutoTokenizer.from_pretrained(tiny), AutoModel.from_pretrained(tiny).eval()
    given = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).last_hidden_state
    mask = given["attention_mask"].unsqueeze(2)
    expected = (states * mask).sum(1) / mask.sum(1)
    loaded = load_text_model(str(tiny), ("note",), 12)
    with torch.no_grad():
        found = pooled(loaded.encoder, torch.from_numpy(loaded.tokens.of_texts(texts)))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.from_numpy(text_model._vectors(loaded, texts)), expected)


def test_vectors_stand_between_numbers_and_codes_and_are_scaled_by_the_training_rows(tiny: Path) -> None:
    found = environments(tiny).fitted(0.1, 0)
    plain = from_table(patients().drop(columns="note"), target="died", environment="hospital", test=["west"]).fitted(
        0.1, 0
    )
    inputs, others = found["east"].inputs, plain["east"].inputs
    assert inputs.shape[1] == others.shape[1] + 16
    torch.testing.assert_close(torch.cat([inputs[:, :2], inputs[:, 18:]], 1), others)
    whole = environments(tiny).fitted(0.0, 0)
    training = torch.cat([whole[name].inputs[:, 2:18] for name in whole.train])
    training = training[training.any(1)]  # without the missing text
    torch.testing.assert_close(training.mean(0), torch.zeros(16), atol=1e-4, rtol=0)
    torch.testing.assert_close(training.std(0, correction=0), torch.ones(16), atol=1e-4, rtol=0)
    assert found.table.widest.widths[0] == 18


def test_texts_are_encoded_once_and_again_after_a_change(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = environments(tiny).fitted(0.1, 0)["east"].inputs
    (kept,) = cache.iterdir()
    encode = text_model._vectors
    monkeypatch.setattr(text_model, "_vectors", lambda *_: pytest.fail("encoded again"))
    assert torch.equal(environments(tiny).fitted(0.1, 0)["east"].inputs, first)
    monkeypatch.setattr(text_model, "_vectors", encode)
    kept.write_bytes(kept.read_bytes()[:50])  # damaged
    assert torch.equal(environments(tiny).fitted(0.1, 0)["east"].inputs, first)
    assert not first[3, 2:18].any()  # a missing text is the mean one
    changed = patients()
    changed.loc[0, "note"] = "another note"
    other = environments(tiny, changed)
    assert not torch.equal(other.fitted(0.1, 0)["east"].inputs, first)
    assert len(list(cache.iterdir())) == 2
    assert other.version != environments(tiny).version


def test_an_empty_text_is_the_same_in_training_and_in_a_registered_model(tiny: Path) -> None:
    loaded, frame = load_text_model(str(tiny), ("note",), 12), patients()
    frame.loc[[5, 40], "note"] = ""
    tokenizer = json.loads(loaded.tokens.tokenizer) | {"post_processor": None}  # without a token of its own
    tokens = dataclasses.replace(loaded.tokens, tokenizer=json.dumps(tokenizer))
    table = environments(tiny, frame).table
    text = TextInputs(dataclasses.replace(loaded, tokens=tokens), train=False, frame=table.frame)
    data = TableEnvironments(table, text=text).fitted(0.0, 0)
    assert data.raw.network is not None
    served = data.raw.network(nn.Identity())
    with torch.no_grad():
        found = served(torch.from_numpy(data.raw.encoder.encode(table.rows(["east"]))))
    torch.testing.assert_close(found, data["east"].inputs, atol=1e-5, rtol=1e-5)


def test_tokens_are_a_part_of_the_encoder_and_read_again_from_json(tiny: Path) -> None:
    loaded = load_text_model(str(tiny), ("note",), 6)
    encoder = TableEncoder((), (), loaded.tokens.width, loaded.tokens)
    assert encoder.columns == ("note",)
    read = TableEncoder.read(json.loads(json.dumps(encoder.as_json())))
    rows = pd.DataFrame({"note": ["much pain", None, "calm and well and calm and well"]})
    found = read.encode(rows)
    assert found.shape == (3, 6)
    assert (found[1] == -1).all()
    assert (found[2] >= 0).all()  # cut off
    assert found[2][-1] == 3


@pytest.mark.parametrize("trained", [False, True])
def test_a_run_learns_from_a_note(trained: bool, tiny: Path, tmp_path: Path) -> None:
    more = {"train_encoder": trained, "epochs": 15, "lr": 0.01, "text_lr": 0.003, "batch_size": 14}
    config = config_of(tiny, tmp_path, columns=("age=ignore", "sex=ignore"), **more)
    job = load_job("table")
    assert preflight(job, config).example is not None
    history = train(job.job, config, ProcessContext(), Silent()).history
    assert history[-1].metrics["ood_auc"] > 0.9


def test_an_encoder_that_is_trained_has_its_own_rate_and_gradients(tiny: Path, tmp_path: Path) -> None:
    config, job = config_of(tiny, tmp_path, train_encoder=True, text_lr=1e-4), load_job("table").job
    network = job.model(config)
    assert isinstance(network, TextNetwork)
    encoder, others = job.parameters_of(network, config)
    assert (encoder["lr"], "lr" in others) == (1e-4, False)
    assert len(encoder["params"]) == len(list(network.encoder.parameters()))
    data = job.environments(config).fitted(0.1, 0)
    network.eval()(data["east"].inputs).sum().backward()
    assert all(each.grad is not None for each in network.encoder.parameters())
    frozen = config.with_options(train_encoder=False)
    assert not isinstance(job.model(frozen), TextNetwork)
    assert isinstance(job.parameters_of(job.model(frozen), frozen)[0], nn.Parameter)


@pytest.mark.parametrize("options", [{"aggregator": "and-mask"}, {"objective": "irm"}, {"objective": "fishr"}])
@pytest.mark.parametrize("trained", [False, True])
def test_rules_and_objectives_take_texts(options: dict[str, Any], trained: bool, tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path, train_encoder=trained, epochs=1, **options)
    job = load_job("table")
    preflight(job, config)
    metrics = train(job.job, config, ProcessContext(), Silent()).history[-1].metrics
    assert np.isfinite(metrics["ood_loss"])


@pytest.mark.parametrize("network", ["ridge", "boosting"])
def test_baselines_take_the_vectors(network: str, tiny: Path, tmp_path: Path) -> None:
    config = config_of(tiny, tmp_path, network=network)
    metrics = train(load_job("table").job, config, ProcessContext(), Silent()).history[-1].metrics
    assert metrics["ood_auc"] > 0.9


@pytest.mark.parametrize("trained", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_registered_model_takes_raw_texts(
    trained: bool, tiny: Path, tmp_path: Path, store: Store, run_id: str
) -> None:
    config, job = config_of(tiny, tmp_path, train_encoder=trained), load_job("table").job
    data, network = job.environments(config).fitted(0.1, 0), job.model(config)
    inputs, raw = data["east"].inputs, data.raw
    assert raw is not None
    assert raw.encoder.columns == ("age", "sex", "note")
    served = load_predictor(store, log_model(store, run_id, network, inputs, raw))
    found = served.predict(patients().head(30))
    with torch.no_grad():
        expected = network.eval()(inputs).softmax(1).numpy()
    np.testing.assert_allclose(found[["0", "1"]].to_numpy(), expected, atol=1e-4)
    assert served.metadata.get_input_schema().input_names() == ["age", "sex", "note"]


def test_columns_are_measured_of_a_run_and_not_of_a_version_with_the_encoder_inside(tiny: Path, tmp_path: Path) -> None:
    config, job = config_of(tiny, tmp_path), load_job("table")
    model, device = job.job.model(config).eval(), torch.device("cpu")
    trained = TrainedModel("noted", "id", job, config, model, {})
    found = table_columns(trained, Settings(), device, lambda *_: None)
    assert [each["column"] for each in found["columns"]] == ["age", "sex"]
    version = dataclasses.replace(trained, model=torch.fx.symbolic_trace(nn.Linear(1, 1)))
    with pytest.raises(InputError, match=r"--model: noted takes texts, .*; give --name"):
        table_columns(version, Settings(), device, lambda *_: None)


def refused_line(tiny: Path, tmp_path: Path, refused: Callable[..., str], frame: pd.DataFrame, *words: str) -> str:
    frame.to_csv(tmp_path / "p.csv", index=False)
    where = ["--data", str(tmp_path / "p.csv"), "--environment", "hospital", "--target", "died"]
    given = words if "--text-model" in words else ("--text-model", str(tiny), *words)
    return refused("train", "table", *where, *given)


WRONG: dict[str, tuple[list[str], str]] = {
    "an identifier": (["--text", "id"], "--text id: has another value in each of 120 rows, such as 'p0', without a"),
    "numbers": (["--text", "age"], "--text age: has numbers, dates or booleans, and no text; leave it out"),
    "nothing": (["--text", "empty"], "--text empty: has no value in the training environments, and no text"),
    "no column": (["--text", "notes"], "--text notes: no such column; there are hospital, note"),
    "the target": (["--text", "died"], "--text died: is the column of another option, too; give another"),
    "no text": (["--train-encoder"], "--train-encoder True: needs --text; give its columns"),
    "no length": (["--text", "note", "--text-length", "0"], "--text-length 0: must be at least 1"),
    "no rate": (["--text", "note", "--text-lr", "0"], "--text-lr 0.0: must be above 0"),
    "a baseline": (["--text", "note", "--train-encoder", "--network", "ridge"], "baselines take a frozen one"),
    "mixup": (["--text", "note", "--train-encoder", "--objective", "mixup"], "mixup cannot mix tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_text_is_refused(case: str, tiny: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    words, line = WRONG[case]
    frame = patients().assign(id=[f"p{row}" for row in range(120)], empty=np.nan)
    assert line in refused_line(tiny, tmp_path, refused, frame, *words)


def test_a_model_without_safetensors_or_with_code_is_refused(
    tiny: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    folder = tmp_path / "unsafe"
    folder.mkdir()
    for file in tiny.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    torch.save({}, folder / "pytorch_model.bin")
    words = ["--text", "note", "--text-model", str(folder)]
    line = refused_line(tiny, tmp_path, refused, patients(), *words)
    assert line.startswith(f"--text-model {folder}: cannot be loaded (")
    assert line.endswith("give a folder with config.json, model.safetensors and tokenizer.json, or a name on the hub")
    described = json.loads((folder / "config.json").read_text())
    code = {"auto_map": {"AutoModel": "own.Model", "AutoConfig": "own.Config"}, "model_type": "own"}
    (folder / "config.json").write_text(json.dumps({**described, **code}))
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    assert "cannot be loaded" in refused_line(tiny, tmp_path, refused, patients(), *words)


def test_without_its_extra_text_says_how_to_install_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load_text_model.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"^--text needs transformers: .*install"):
        environments(tiny)


def test_a_check_names_the_option_and_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patients().to_csv(tmp_path / "p.csv", index=False)
    check = ["data", "table", "--check", str(tmp_path / "p.csv"), "--environment", "hospital", "--target", "died"]
    assert main(check) == 0
    line = next(each for each in capsys.readouterr().err.splitlines() if each.startswith("column note"))
    assert line.startswith("column note is ignored: text with 119 different values in 119 training rows, such as ")
    assert line.endswith("; --text note makes inputs of it")
    assert main([*check, "--text", "note", "--columns", "age=ignore", "sex=ignore"]) == 0
    assert "column note: text, of which an encoder makes inputs\n" in capsys.readouterr().err
