"""Colored MNIST, PunctuatedSST-2 and Example 1: the shared signal, the shortcut, and its frequency."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.testing import assert_close

from concord.aggregation import AndMask
from concord.environments import Environments, LabelledImages
from concord.errors import InputError, format_for_cli
from concord.gradients import PerExample
from concord_jobs.colored_mnist.data import ColoredMNIST
from concord_jobs.colored_mnist.figures import images_figure
from concord_jobs.cow_grass import CowGrassConfig
from concord_jobs.cow_grass import job as cow_grass
from concord_jobs.digits import CodedDomains
from concord_jobs.irm_regression.data import linear_example
from concord_jobs.punctuated_sst2.data import PADDING, SST2, UNKNOWN, PunctuatedSST2, Sentences, read_glove, vocabulary
from concord_jobs.punctuated_sst2.word_average import WordAverage
from concord_jobs.tumours import SpuriousColumn

DIGITS = 20_000


def digits(count: int = DIGITS, seed: int = 0) -> LabelledImages:
    """Random pixels; each image's first pixel of the first row is 255, and its second row tells which image it is."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(1, 200, (count, 1, 28, 28), generator=generator, dtype=torch.uint8)
    images[:, 0, 2, 0], images[:, 0, 2, 2] = torch.arange(count) // 256, torch.arange(count) % 256
    return LabelledImages(images, torch.randint(0, 10, (count,), generator=generator))


def colored(**changes: Any) -> ColoredMNIST:
    return ColoredMNIST(**{"train": digits(), "test": digits(5000, 1), **changes})


def parts(data: ColoredMNIST, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Colours, labels and the images' numbers, of an environment."""
    environment = data.as_environments()[name]
    images = environment.inputs
    lit = images.flatten(2).sum(2)
    assert (lit.bool().sum(1) == 1).all()  # one channel has all the light
    grey = images.sum(1, dtype=torch.int64)
    return lit.argmax(1), environment.targets, grey[:, 1, 0] * 256 + grey[:, 1, 1]


@pytest.mark.parametrize("classes", [2, 5, 10])
def test_the_colour_is_the_noisy_labels_own_but_for_its_flips(classes: int) -> None:
    data = colored(classes=classes, observed_flips=(0.5,))
    for name, flip in {"train-0.1": 0.1, "train-0.2": 0.2, "flip-0.5": 0.5, "ood-0.9": 0.9}.items():
        colours, labels, numbers = parts(data, name)
        source = data.train if name.startswith("train") else data.test
        true = source.labels[numbers] * classes // 10
        wrong = labels != true
        assert abs(wrong.double().mean() - 0.25) < 0.025
        assert torch.equal(labels[wrong], (true[wrong] + 1) % classes)
        misled = colours != labels
        assert abs(misled.double().mean() - flip) < 0.025
        assert torch.equal(colours[misled], (labels[misled] + 1) % classes)
        assert abs(misled[wrong].double().mean() - flip) < 0.05  # whatever the noise


def test_training_environments_share_no_digit_and_tests_have_all() -> None:
    data = colored(observed_flips=(0.1,))
    (_, _, first), (_, _, second) = parts(data, "train-0.1"), parts(data, "train-0.2")
    assert len(first) == len(second) == DIGITS // 2
    assert len({*first.tolist(), *second.tolist()}) == DIGITS
    for name in ("ood-0.9", "flip-0.1"):
        assert torch.equal(parts(data, name)[2], torch.arange(5000))


def test_fewer_examples_are_some_of_them() -> None:
    data = colored(examples=700)
    (_, _, first), (_, _, second) = parts(data, "train-0.1"), parts(data, "train-0.2")
    assert len(first) == 700
    assert not set(first.tolist()) & set(second.tolist())


def test_the_noise_gap_keeps_the_mean() -> None:
    data = colored(noise_gap=0.2, train=digits(40_000), classes=2)
    noises = []
    for name in ("train-0.1", "train-0.2"):
        _, labels, numbers = parts(data, name)
        noises.append(float((labels != data.train.labels[numbers] // 5).double().mean()))
    assert noises == pytest.approx([0.35, 0.15], abs=0.02)


def test_patches_mislead_on_their_own() -> None:
    data = colored(patch_flips=(0.2, 0.1), train=digits(40_000))
    for name, flip in {"train-0.1": 0.2, "train-0.2": 0.1, "ood-0.9": 0.9}.items():
        environment = data.as_environments()[name]
        upper = (environment.inputs[:, :, :3, :3] == 255).flatten(1).all(1)
        lower = (environment.inputs[:, :, -2:, -2:] == 255).flatten(1).all(1)
        assert (upper != lower).all()
        wrong = lower.long() != environment.targets
        assert abs(wrong.double().mean() - flip) < 0.025


def test_grey_images_have_no_colour() -> None:
    data = colored(grey=True)
    environment = data.as_environments()["ood-0.9"]
    assert environment.inputs.shape == (5000, 1, 14, 14)
    assert torch.equal(environment.inputs, data.test.images[:, :, ::2, ::2])
    assert colored(side=28, grey=True).as_environments()["ood-0.9"].inputs.shape == (5000, 1, 28, 28)


def test_the_seed_decides() -> None:
    one, same, other = (colored(seed=seed).as_environments()["train-0.1"] for seed in (3, 3, 4))
    assert torch.equal(one.inputs, same.inputs)
    assert torch.equal(one.targets, same.targets)
    assert not torch.equal(one.targets, other.targets)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes": 3}, "classes=3: must be 2, 5 or 10"),
        ({"flips": (0.1, 1.2)}, r"flips=1.2: must be a probability, in \[0, 1\]"),
        ({"test_flip": -0.1}, "test_flip=-0.1: must be a probability"),
        ({"flips": ()}, r"flips=\(\): gives no training environment"),
        ({"patch_flips": (0.1,)}, r"patch_flips=\(0.1,\): give one for each of the 2 training environments"),
        ({"patch_flips": (0.1, 0.2), "classes": 5}, r"patch_flips=\(0.1, 0.2\): .* and 2 classes"),
        ({"noise": 0.9, "noise_gap": 0.4}, r"noise=0.9: with a gap of 0.4, noise 1.1 is outside \[0, 1\]"),
        ({"side": 7}, "side=7: must be 14 or 28"),
        ({"examples": 10_001}, "examples=10001: there are 10000 for each training environment"),
    ],
)
def test_colours_that_cannot_be_are_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        colored(**changes)


# PunctuatedSST-2


def write_sst2(folder: Path, sentences: int = 4000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for name in ("train", "test"):
        labels = torch.randint(0, 2, (sentences,), generator=generator).tolist()
        lines = [f"a {'fine' if label else 'dull'} film {number} .\t{label}" for number, label in enumerate(labels)]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def sst2(tmp_path_factory: pytest.TempPathFactory) -> SST2:
    return SST2.read(write_sst2(tmp_path_factory.mktemp("data") / "sst2").parent)


def test_marks_mislead_and_words_do_not(sst2: SST2) -> None:
    numbers = vocabulary(sst2.train)
    environments = PunctuatedSST2(sst2, numbers, noise=0.25).as_environments()
    for name, flip in {"train-0-0.1": 0.1, "train-1-0.2": 0.2, "ood-0.9": 0.9}.items():
        inputs, labels = environments[name].inputs, environments[name].targets
        true = (inputs == numbers["fine"]).any(1).long()
        assert abs((labels != true).double().mean() - 0.25) < 0.03
        ends = inputs.gather(1, (inputs != PADDING).sum(1, keepdim=True) - 1)[:, 0]
        assert set(ends.tolist()) == {numbers["!"], numbers["."]}
        assert abs(((ends == numbers["."]).long() != labels).double().mean() - flip) < 0.03
    together = torch.cat([environments[name].inputs for name in environments.train])
    assert len(together) == 4000
    without = PunctuatedSST2(sst2, numbers, punctuate=False).as_environments()["ood-0.9"].inputs
    assert not ((without == numbers["."]) | (without == numbers["!"])).any()


def test_a_validation_environment_has_the_sentences_of_dev(sst2: SST2, tmp_path: Path) -> None:
    folder = write_sst2(tmp_path / "sst2")
    (folder / "dev.tsv").write_text("a fine play .\t1\na dull play .\t0\n" * 1000)
    numbers = vocabulary(sst2.train)
    environments = PunctuatedSST2(SST2.read(folder), numbers, noise=0.0, validation_flip=0.5).as_environments()
    assert environments.validation == ("validation-0.5",)
    inputs, labels = environments["validation-0.5"].inputs, environments["validation-0.5"].targets
    assert labels.tolist() == [1, 0] * 1000
    ends = inputs.gather(1, (inputs != PADDING).sum(1, keepdim=True) - 1)[:, 0]
    assert abs(((ends == numbers["."]).long() != labels).double().mean() - 0.5) < 0.05
    without = PunctuatedSST2(sst2, numbers, noise=0.0)
    assert not without.as_environments().validation
    for name in (*environments.train, *environments.test):
        assert_close(environments[name].targets, without.as_environments()[name].targets)
        assert_close(environments[name].inputs, without.as_environments()[name].inputs)
    with pytest.raises(InputError, match=r"validation_flip=0.5: needs dev\.tsv of SST-2 beside train\.tsv"):
        PunctuatedSST2(sst2, numbers, validation_flip=0.5).as_environments()
    with pytest.raises(InputError, match=r"validation_flip=1.5: must be a probability"):
        PunctuatedSST2(sst2, numbers, validation_flip=1.5).check()


def test_words_that_training_never_saw_are_one(sst2: SST2) -> None:
    words = Counter(word for words in sst2.train.words for word in words)
    known = vocabulary(Sentences((tuple(word for word, count in words.items() if count > 1),), torch.tensor([0])))
    environments = PunctuatedSST2(sst2, known).as_environments()
    assert (environments["ood-0.9"].inputs == UNKNOWN).any(1).all()


def test_words_without_a_number_can_be_left_out(sst2: SST2) -> None:
    """So that they do not count in a mean of vectors."""
    known = vocabulary(Sentences((("fine", "dull", "film"),), torch.tensor([0])))
    environments = PunctuatedSST2(sst2, known, other=PADDING, noise=0.0).as_environments()
    rows = [[number for number in row if number != PADDING] for row in environments["ood-0.9"].inputs.tolist()]
    marks, words = {known["!"], known["."]}, {known["fine"], known["dull"]}
    assert all(len(row) == 3 and row[0] in words and row[1] == known["film"] and row[2] in marks for row in rows)


def test_missing_or_wrong_sentences_are_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data=None: needed; give a folder with train\.tsv, test\.tsv"):
        SST2.read(None)
    with pytest.raises(InputError, match=r"train\.tsv, test\.tsv not there, nor in its folder sst2; SST-2 is"):
        SST2.read(tmp_path)
    folder = write_sst2(tmp_path / "sst2", 3)
    (folder / "test.tsv").write_text("fine\t1\nno label\n")
    with pytest.raises(InputError, match=r"test.tsv, line 2: expected a sentence, a tab and 0 or 1, found 'no label'"):
        SST2.read(tmp_path)


def test_glove_vectors_are_read_and_stay(tmp_path: Path) -> None:
    path = tmp_path / "glove.txt"
    path.write_text("fine 1 2 3\nother 4 5 6\n. 7 8 9.5\n")
    found, size = read_glove(path, ["fine", ".", "dull"])
    assert size == 3
    assert_close(found, {"fine": torch.tensor([1.0, 2.0, 3.0]), ".": torch.tensor([7.0, 8.0, 9.5])})
    with pytest.raises(InputError, match=r"line 1 has 3 numbers, expected 100"):
        read_glove(path, ["fine"], 100)
    path.write_text("fine 1 2 3\ndull 1 2\n")
    with pytest.raises(InputError, match=r"line 2 has 2 numbers, expected 3"):
        read_glove(path, ["fine"])
    path.write_text("fine 1 x 3\n")
    with pytest.raises(InputError, match="cannot be read as GloVe vectors"):
        read_glove(path, ["fine"])
    with pytest.raises(InputError, match="cannot be read as GloVe vectors"):
        read_glove(tmp_path / "none.txt", ["fine"])
    path.write_text("fine 1 2 3\n")
    with pytest.raises(InputError, match="has none of the 1 words"):
        read_glove(path, ["dull"])


def test_a_sentence_is_the_average_of_its_words() -> None:
    vectors = torch.randn(5, 4)
    model = WordAverage(5, 4, 2, hidden_units=3, vectors=vectors)
    words = torch.tensor([[2, 3, 3, 0, 0], [4, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    averages = torch.stack([(vectors[2] + 2 * vectors[3]) / 3, vectors[4], torch.zeros(4)])
    assert_close(model(words), model.mlp(averages))
    assert not model.vectors.weight.requires_grad
    assert WordAverage(5, 4, 2).vectors.weight.requires_grad


# Example 1


def test_example_1_has_its_variances() -> None:
    environments = linear_example((0.5, 2.0), (0.1,), examples=50_000)
    assert environments.train == ("train-0.5", "train-2")
    for name, sigma in {"train-0.5": 0.5, "train-2": 2.0, "test-0.1": 0.1}.items():
        inputs, targets = environments[name].inputs, environments[name].targets
        x, z = inputs[:, :2], inputs[:, 2:]
        assert_close(x.var(0), torch.full((2,), sigma**2), rtol=0.03, atol=0)
        assert_close(z.var(0), torch.full((2,), 2 * sigma**2 + 1), rtol=0.03, atol=0)
        # The best possible error, of the weights 1 on X and 0 on Z.
        assert_close((x.sum(1, keepdim=True) - targets).square().mean(), torch.tensor(2 * sigma**2), rtol=0.03, atol=0)
    assert torch.equal(environments["seen-2"].inputs, environments["train-2"].inputs)


def test_example_1_has_the_tutorials_correlations() -> None:
    """Of X and Z with the target, in the tests with σ of .01, .1 and 1."""
    environments = linear_example()
    printed = {
        "0.01": (0.502, 0.507, 0.024, 0.011),
        "0.1": (0.507, 0.497, 0.108, 0.097),
        "1": (0.494, 0.507, 0.575, 0.583),
    }
    for sigma, correlations in printed.items():
        data = environments[f"test-{sigma}"]
        found = torch.corrcoef(torch.cat([data.inputs, data.targets], 1).T)[-1, :4]
        assert_close(found, torch.tensor(correlations), atol=0.04, rtol=0)


def test_an_example_1_that_cannot_be_is_said() -> None:
    with pytest.raises(InputError, match=r"train_sigmas=\(0.1, 0.0\): give standard deviations above 0"):
        linear_example((0.1, 0.0))
    with pytest.raises(InputError, match="examples=0: must be at least 1"):
        linear_example(examples=0)


def coded(**changes: Any) -> Environments:
    options = CodedDomains(**{"code_dimensions": 4, **changes})
    options.check()
    return options.environments(torch.arange(1000.0)[:, None], torch.arange(1000) % 3, seed=0)


@pytest.mark.parametrize("domains", [1, 3, 7, 100])
def test_domains_share_no_example_and_together_with_the_test_have_all(domains: int) -> None:
    environments = coded(domains=domains)
    assert len(environments.train) == domains
    numbers = torch.cat([environments[name].inputs[:, 0] for name in environments.names])
    assert torch.equal(numbers.sort().values, torch.arange(1000.0))
    sizes = [len(environments[name]) for name in environments.train]
    assert max(sizes) - min(sizes) <= 1


def test_a_domain_has_one_code_a_class_and_the_test_one_an_example() -> None:
    environments = coded(domains=3)
    codes = {}
    for name in environments.train + environments.validation:
        inputs, targets = environments[name].data
        for label in range(3):
            (codes[name, label],) = torch.unique(inputs[targets == label, 1:], dim=0)
    assert len(torch.unique(torch.stack(list(codes.values())), dim=0)) == len(codes)
    test = environments["ood"].inputs
    assert len(torch.unique(test[:, 1:], dim=0)) == len(test) == 200


def spurious(**changes: Any) -> Environments:
    options = SpuriousColumn(**changes)
    options.check()
    return options.environments(torch.arange(60_000.0)[:, None], torch.arange(60_000) % 2, seed=0)


def test_the_column_is_the_noisy_labels_sign_but_for_its_flips() -> None:
    flips = {"site-0": 0.05, "site-1": 0.1, "site-2": 0.15, "validation": 0.5, "ood": 0.9}
    environments = spurious()
    assert [*environments.train, *environments.validation, *environments.test] == list(flips)
    rows = []
    for name, flip in flips.items():
        inputs, labels = environments[name].data
        rows.append(inputs[:, 0])
        assert abs((labels != inputs[:, 0] % 2).double().mean() - 0.2) < 0.02
        assert abs((2 * labels - 1 != inputs[:, 1]).double().mean() - flip) < 0.02
    assert torch.equal(torch.cat(rows).sort().values, torch.arange(60_000.0))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: coded(domains=0), "--domains 0: must lie in [1, 600], the examples that train"),
        (lambda: coded(domains=601), "--domains 601: must lie in [1, 600], the examples that train"),
        (lambda: coded(validation_domains=201), "--validation-domains 201: must be at most 200"),
        (lambda: coded(code_scale=-1.0), "--code-scale -1.0: must not be negative"),
        (lambda: spurious(flips=()), "--flips: give a probability for each training environment"),
        (lambda: spurious(test_flip=1.1), "--test-flip 1.1: must be a probability, in [0, 1]"),
    ],
)
def test_domains_and_columns_that_cannot_be_made_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        make()
    assert said in format_for_cli(refused.value)


def test_the_figure_of_the_images_shows_colours_patches_and_labels() -> None:
    data = colored(patch_flips=(0.2, 0.1)).as_environments()
    shown = {name: (data[name].inputs, data[name].targets) for name in (*data.train, *data.test)}
    axes = images_figure(shown).axes
    for place, (images, labels) in enumerate(shown.values()):
        for index in range(8):
            drawn = torch.from_numpy(axes[8 * place + index].images[0].get_array().data)
            assert axes[8 * place + index].get_title() == f"class {labels[index]}"
            lit = images[index] > 0
            assert_close((drawn > 0).any(2), lit.any(0))
            assert (drawn[lit.all(0)] == torch.tensor([1.0, 1.0, 1.0], dtype=drawn.dtype)).all()  # a patch


# --- cows and grass


def pasture(name: str, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels, and whether the background agrees with them."""
    examples = cow_grass.environments(CowGrassConfig().with_options(**options))[name]
    return examples.inputs[:, :-1], examples.targets, examples.inputs[:, -1] == 2 * examples.targets - 1


@pytest.mark.parametrize(("grass", "test_grass"), [(0.8, 0.2), (0.9, 0.5), (1.0, 0.0)])
def test_the_background_agrees_as_often_as_given(grass: float, test_grass: float) -> None:
    for name, probability in (("all", grass), ("ood", test_grass)):
        agrees = pasture(name, grass=grass, test_grass=test_grass)[2].double()
        assert abs(agrees.mean() - probability) <= 4 * (probability * (1 - probability) / len(agrees)) ** 0.5


def test_a_split_herd_has_the_rows_of_the_whole_herd() -> None:
    images, labels, agrees = pasture("all", seed=3)
    for name, chosen in (("agrees", agrees), ("differs", ~agrees)):
        found = pasture(name, seed=3, split=True)
        assert_close(found, (images[chosen], labels[chosen], agrees[chosen]), rtol=0, atol=0)


@pytest.mark.parametrize(("threshold", "kept"), [(0.5, [True, True]), (0.7, [True, False]), (1.0, [True, False])])
def test_where_a_weight_sees_the_whole_cow_its_agreement_exceeds_the_grass(threshold: float, kept: list[bool]) -> None:
    """Appendix C.2: an example's gradient has the sign of the cow always, and of the grass in 80 % of the examples."""
    _, labels, agrees = pasture("all")
    cow = 2.0 * labels - 1
    rows = torch.stack([cow, torch.where(agrees, cow, -cow)], 1)
    linear = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(linear.weight)
    per_example = PerExample(linear, AndMask(threshold))
    binary_cross_entropy_with_logits(linear(rows)[:, 0], labels.float()).backward()
    per_example.aggregate()
    assert linear.weight.grad is not None
    assert (linear.weight.grad[0] != 0).tolist() == kept


def test_shares_that_are_no_probabilities_are_refused() -> None:
    with pytest.raises(InputError, match=r"grass"):
        CowGrassConfig().with_options(grass=1.2).check()
