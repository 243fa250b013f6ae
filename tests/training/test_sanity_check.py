"""Errors of a user's own learner, found before training."""

import copy
import gc
import traceback
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from metadist.algorithms import (
    MAML,
    InnerLoopLearner,
    Learner,
    Prototypical,
    Supervised,
    TaskResult,
)
from metadist.algorithms.learner import as_task_result
from metadist.distributed.partitioners import DimPartitioner
from metadist.distributed.reducers import MeanReducer
from metadist.distributed.worker_local import WorkerLocal
from metadist.errors import UserError
from metadist.models import MLP, Conv4
from metadist.tasks import (
    Episode,
    Examples,
    FewShotTasks,
    Glyphs,
    Sinusoid,
    SupervisedTasks,
    stack_episodes,
    task_keys,
)
from metadist.training import LocalStrategy, MetaBatch, TrainerConfig, TrainMapper
from metadist.training.sanity_check import check_before_training, run_sanity_check

TRAINER = TrainerConfig(meta_batch_size=2, task_chunk_size=4, eval_tasks=2)


class Returns(Learner):
    """Returns what a function makes of the loss."""

    def __init__(self, model: nn.Module, make) -> None:
        super().__init__(model)
        self.make = make

    def forward(self, episode):
        predictions = self.model(episode.query.inputs)
        loss = self.loss(predictions, episode.query.targets)
        if self.training:
            return self.make(loss)
        return TaskResult(loss, self.metrics(predictions, episode.query.targets), predictions)


class WrongShape(nn.Module):
    """A model with a shape error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 3)

    def forward(self, inputs):
        return self.compute(inputs.flatten(1))

    def compute(self, inputs):
        return self.layer(inputs)  # the line of the error


@pytest.fixture(scope="module")
def tasks() -> FewShotTasks:
    dataset = Glyphs(train_classes=4, validation_classes=4, test_classes=4, examples=4)
    return FewShotTasks(dataset, ways=3, shots=1, queries=2)


@pytest.fixture
def model(tasks) -> MLP:
    return MLP(tasks.input_shape, tasks.outputs, [4])


def test_the_dataset_is_not_kept(model):
    dataset = Glyphs(train_classes=4, validation_classes=4, test_classes=4, examples=4)
    tasks = FewShotTasks(dataset, ways=3, shots=1, queries=2)
    run_sanity_check(tasks, MAML(model))
    kept = weakref.ref(tasks)
    del tasks
    gc.collect()
    assert kept() is None


def test_an_error_of_the_users_model_names_its_line_in_one_traceback(tasks):
    lines = Path(__file__).read_text().splitlines()
    number = 1 + next(i for i, text in enumerate(lines) if "# the line of the error" in text)
    with pytest.raises(RuntimeError, match=rf"test_sanity_check\.py:{number}, in compute: ") as got:
        run_sanity_check(tasks, MAML(WrongShape()))
    assert not isinstance(got.value, UserError)
    assert "shapes cannot be multiplied" in str(got.value)
    text = "".join(traceback.format_exception(got.value))
    assert f'test_sanity_check.py", line {number}' in text
    assert text.count("Traceback") == 1 and text.count("in compute") == 2


def test_what_an_error_of_the_users_model_was_raised_from_is_kept(tasks, model):
    def fail(loss):
        try:
            return {}["missing"]
        except KeyError as error:
            raise ValueError("the user's own") from error

    with pytest.raises(RuntimeError, match="in fail: ValueError: the user's own") as got:
        run_sanity_check(tasks, Returns(model, fail))
    text = "".join(traceback.format_exception(got.value))
    assert text.count("Traceback") == 2 and "KeyError: 'missing'" in text


class ChangesInputs(MLP):
    """A model that scales its inputs in place."""

    def forward(self, inputs):
        return super().forward(inputs.mul_(0.5))


def test_a_model_that_changes_its_inputs_is_refused(tasks):
    model = ChangesInputs(tasks.input_shape, tasks.outputs, [4])
    with pytest.raises(UserError, match=r"ChangesInputs\.forward changes its inputs in place"):
        run_sanity_check(tasks, MAML(model))


class Broken(FewShotTasks):
    """Tasks with one tensor changed by a function."""

    def __init__(self, dataset, change) -> None:
        super().__init__(dataset, ways=3, shots=1, queries=2)
        self.change = change

    def sample(self, key):
        support, query = super().sample(key)
        return Episode(support, self.change(query))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda query: query._replace(inputs=query.inputs * torch.nan), "query.inputs with NaN"),
        (
            lambda query: query._replace(targets=query.targets + 1),
            "s from 1 to 3, and a task has 3",
        ),
        (lambda query: query._replace(targets=query.targets - 1), "number its classes from 0 to 2"),
        (lambda query: query._replace(targets=query.targets.int()), "give class indices of torch"),
        (
            lambda query: query._replace(targets=nn.functional.one_hot(query.targets, 3).float()),
            r"targets of shape \(6, 3\): give class indices of shape \(n,\), .* by \.argmax\(1\)\.",
        ),
        (
            lambda query: query._replace(targets=query.targets[:, None]),
            r"targets of shape \(6, 1\): .* as by \.squeeze\(1\)\.",
        ),
        (lambda query: query._replace(targets=query.targets[:5]), "targets for 5 of 6 inputs"),
        (
            lambda query: query._replace(inputs=(query.inputs > 0).byte()),
            r"cannot process inputs of torch.uint8 \(.*: let the dataset give float32",
        ),
    ],
)
def test_data_that_cannot_be_learned_from_are_one_sentence(tasks, model, change, message):
    with pytest.raises(UserError, match=message):
        run_sanity_check(Broken(tasks.dataset, change), MAML(model))


def test_parameters_that_are_not_initialized_are_named(tasks, model):
    next(model.parameters()).data.fill_(torch.nan)
    with pytest.raises(UserError, match=r"the parameter model\..*weight is NaN or infinite"):
        run_sanity_check(tasks, MAML(model))


def lines(change) -> FewShotTasks:
    """Tasks of sine waves, whose episodes a function changes."""

    class Lines(Sinusoid):
        def episode(self, *arguments):
            return change(super().episode(*arguments))

    return FewShotTasks(Lines(), ways=1, shots=3, queries=4)


def on_queries(change):
    """Changes the queries' inputs and targets."""
    return lambda episode: Episode(episode.support, Examples(*change(*episode.query)))


class SampledTogether(FewShotTasks):
    """Regression tasks with a `sample_batch` that a function changes."""

    def __init__(self, change) -> None:
        super().__init__(Sinusoid(), ways=1, shots=3, queries=2)
        self.change = change

    def sample_batch(self, keys, device):
        return self.change(stack_episodes([self.sample(key) for key in keys]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (on_queries(lambda x, y: (x, y.flip(0))), "gives other tasks than"),
        (on_queries(lambda x, y: (x, y[:1])), "gives other tasks than"),
        (on_queries(lambda x, y: (x, y + len(y))), "gives other tasks than"),
        (on_queries(lambda x, y: (x, y.double())), "gives other tasks than"),
        (list, r"\.sample_batch gives a list: return an Episode"),
    ],
    ids=["order", "too few", "not of the key alone", "dtype", "type"],
)
def test_tasks_that_are_sampled_together_are_those_of_sample(change, message):
    learner = MAML(MLP((1,), 1, hidden=[4], batch_norm=False), regression=True)
    for correct in (lambda batch: batch, lambda batch: None):
        run_sanity_check(SampledTogether(correct), learner)
    with pytest.raises(UserError, match=message):
        run_sanity_check(SampledTogether(change), learner)


class NumberedFromZero(SampledTogether):
    """Its `sample_batch` takes the place of a task in the batch for its index."""

    def sample_batch(self, keys, device):
        keys = keys.clone()
        keys[:, 3] = torch.arange(len(keys))
        return super().sample_batch(keys, device)


def test_tasks_that_are_sampled_together_depend_on_their_own_keys_alone():
    learner = MAML(MLP((1,), 1, hidden=[4], batch_norm=False), regression=True)
    with pytest.raises(UserError, match="one task per key, each from its own key alone"):
        run_sanity_check(NumberedFromZero(lambda batch: batch), learner)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (on_queries(lambda x, y: (x, y.flip(0))), r"^Sampled\.episodes gives other .* generators:"),
        (list, r"^Sampled\.episodes gives a list: return an Episode"),
    ],
    ids=["order", "type"],
)
def test_episodes_of_a_dataset_that_are_sampled_together_are_those_of_episode(change, message):
    class Sampled(Sinusoid):
        def episodes(self, device, generators, *arguments):
            return change(stack_episodes([self.episode(each, *arguments) for each in generators]))

    learner = MAML(MLP((1,), 1, hidden=[4], batch_norm=False), regression=True)
    with pytest.raises(UserError, match=message):
        run_sanity_check(FewShotTasks(Sampled(), ways=1, shots=3, queries=2), learner)


def test_a_description_of_another_type_is_one_sentence():
    class Described(Sinusoid):
        def describe(self, *arguments):
            return ["a sine wave"]

    learner = MAML(MLP((1,), 1, hidden=[4], batch_norm=False), regression=True)
    with pytest.raises(
        UserError, match=r"^describe, of Described or of FewShotTasks, returns a list: r"
    ):
        run_sanity_check(FewShotTasks(Described(), ways=1, shots=3, queries=2), learner)


class NamedByNumber(MAML):
    """Returns a metric whose name is no text."""

    def forward(self, episode):
        result = super().forward(episode)
        return result._replace(metrics={**result.metrics, 3: result.loss.detach()})


def test_names_of_metrics_are_texts(tasks, model):
    with pytest.raises(UserError, match="returned a metric named 3: give it a text"):
        run_sanity_check(tasks, NamedByNumber(model))


class WithoutClass(FewShotTasks):
    """Tasks whose support set lacks a class."""

    lacks = 0

    def sample(self, key):
        support, query = super().sample(key)
        targets = torch.where(support.targets == self.lacks, 0, support.targets)
        return Episode(support._replace(targets=targets), query)


@pytest.mark.parametrize("lacks", [1, 2])  # 2: queries are of a class above those of the support
def test_prototypes_need_a_support_example_of_each_class(tasks, model, lacks):
    incomplete = WithoutClass(tasks.dataset, ways=3, shots=1, queries=2)
    incomplete.lacks = lacks
    run_sanity_check(incomplete, MAML(model))
    with pytest.raises(UserError, match=f"without support examples of class {lacks}"):
        run_sanity_check(incomplete, Prototypical(model))


class ClassIndices(MAML):
    def forward(self, episode):
        result = super().forward(episode)
        if self.training:
            return result
        return result._replace(predictions=result.predictions.argmax(-1))


def test_a_model_with_too_many_outputs_is_reported(tasks, caplog):
    learners = [MAML(MLP(tasks.input_shape, outputs, [4]), inner_lr=0.1) for outputs in (5, 3)]
    for learner in learners:
        run_sanity_check(tasks, learner)
    assert [record.getMessage() for record in caplog.records] == [
        "MAML.forward returned 5 values for each query, and a task has 3 outputs: the loss also "
        "treats the additional values as classes; let the __init__ of MLP take outputs, the width "
        "of its last layer"
    ]


def test_predictions_are_one_row_for_each_query(tasks, model):
    with pytest.raises(
        UserError, match=r"predictions of shape \(6,\) in evaluation: return the log"
    ):
        run_sanity_check(tasks, ClassIndices(model))


def test_a_loss_that_cannot_be_differentiated_is_found(tasks, model):
    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise NotImplementedError("the user's own")

    with pytest.raises(RuntimeError, match=r"test_sanity_check\.py:\d+, in backward: NotImpl"):
        run_sanity_check(tasks, Returns(model, NoBackward.apply))


def test_a_learner_with_other_outputs_may_have_more_classes_in_the_test(model):
    dataset = Glyphs(train_classes=3, validation_classes=6, test_classes=6, examples=4)
    tasks = SupervisedTasks(dataset, 4, held_out=2, ways=5, shots=1, queries=2)
    run_sanity_check(tasks, Supervised(MLP(tasks.input_shape, tasks.outputs, [4])))


class OfACopy(Learner):
    """Adapts and differentiates a copy of its model."""

    def forward(self, episode):
        copied = copy.deepcopy(self.model)
        predictions = copied(episode.query.inputs)
        metrics = self.metrics(predictions, episode.query.targets)
        return TaskResult(self.loss(predictions, episode.query.targets), metrics, predictions)


class InPlace(Learner):
    """Adapts its own parameters."""

    def forward(self, episode):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.9)
        predictions = self.model(episode.query.inputs)
        metrics = self.metrics(predictions, episode.query.targets)
        return TaskResult(self.loss(predictions, episode.query.targets), metrics, predictions)


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        (OfACopy, r"OfACopy.forward returned in training has no gradient: .* without a copy"),
        (InPlace, "InPlace.forward changed the learner's parameters in a train task"),
    ],
)
def test_a_learner_that_does_not_train_its_parameters_is_found(tasks, model, learner, message):
    with pytest.raises(UserError, match=message):
        run_sanity_check(tasks, learner(model))


class SparseEmbedding(nn.Module):
    """Means of embeddings of the brightness of each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 3, sparse=True)

    def forward(self, inputs):
        return self.embedding((inputs * 255).long().flatten(1)).mean(1)


def test_sparse_gradients_are_refused(tasks):
    for learner in (MAML(SparseEmbedding()), Returns(SparseEmbedding(), lambda loss: loss)):
        with pytest.raises(UserError, match="SparseEmbedding has a sparse gradient"):
            run_sanity_check(tasks, learner)


def test_a_misfit_outside_the_users_code_is_one_sentence(tasks):
    with pytest.raises(UserError, match="cannot process a train task of this shape"):
        run_sanity_check(tasks, MAML(nn.Sequential(nn.Flatten(), nn.Linear(7, 3))))


class Changed(nn.Module):
    """A model whose predictions are changed in `forward`, with a layer that it does not use."""

    def __init__(self, change) -> None:
        super().__init__()
        self.layer, self.unused, self.change = nn.Linear(784, 3), nn.Linear(2, 2), change

    def forward(self, inputs):
        return self.change(self.layer(inputs.flatten(1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda outputs: None, r"Changed.forward returned a NoneType: return a tensor of shape "),
        (lambda outputs: (outputs, 1), r"Changed.forward returned a tuple: .* \(n, 3\) for n in"),
        (torch.detach, r"MAML cannot differentiate a train task \(.*\): .* without detach\(\)"),
    ],
)
def test_predictions_that_are_no_tensors_or_have_no_gradient(tasks, change, message):
    with pytest.raises(UserError, match=message):
        run_sanity_check(tasks, MAML(Changed(change)))


def test_modules_in_a_plain_list_are_reported(tasks, caplog):
    learner = MAML(Conv4((1, 28, 28), 3, filters=4))
    learner.blocks = [learner.model.head]
    run_sanity_check(tasks, learner)
    assert not caplog.records
    learner.scales = {"first": nn.Linear(2, 2)}
    run_sanity_check(tasks, learner)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("MAML.scales holds modules that are not registered, so that their")


def test_parameters_that_are_not_used_are_reported(tasks, caplog):
    run_sanity_check(tasks, MAML(Changed(torch.Tensor.exp)))
    assert [record.getMessage() for record in caplog.records] == [
        "the loss of a task does not depend on model.unused.weight, model.unused.bias: check that "
        "forward uses it, or freeze it with requires_grad_(False)"
    ]


def test_the_outputs_of_a_model_that_does_not_fit_are_in_the_message(tasks):
    returned = (
        r"for inputs of shape \(6, 1, 28, 28\) the model returned shape \(6, 2\), and the task"
    )
    with pytest.raises(UserError, match=f"{returned} has 3 outputs: change"):
        run_sanity_check(tasks, MAML(nn.Sequential(nn.Flatten(), nn.Linear(784, 2))))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda loss: (loss, {}), r"Returns\.forward returned a tuple: return .*TaskResult\("),
        (lambda loss: None, "returned a NoneType: return"),
        (lambda loss: TaskResult(loss.item(), {}), r"returned a loss \d.*: return a scalar tensor"),
        (lambda loss: loss.expand(3), r"returned a loss of shape \(3,\): return a scalar tensor"),
        (lambda loss: TaskResult(loss, None), "metrics of type NoneType: return a dict"),
        (
            lambda loss: TaskResult(loss, {"a": "b"}),
            r"not scalars \({'a': 'str'}\): return for each",
        ),
        (lambda loss: TaskResult(loss, {"a": torch.ones(2)}), r"not scalars \({'a': \(2,\)}\)"),
        (lambda loss: loss.detach(), "has no gradient: compute it from the learner's parameters"),
    ],
)
def test_a_wrong_result_is_one_sentence(tasks, model, make, message):
    with pytest.raises(UserError, match=message):
        run_sanity_check(tasks, Returns(model, make))


@pytest.mark.parametrize("twice", [False, True])
def test_a_loss_that_cannot_be_differentiated_is_one_sentence(tasks, model, twice):
    def make(loss):
        if twice:
            torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
            return TaskResult(loss, {})
        root = loss.sqrt()
        root.detach().add_(1)
        return TaskResult(root, {})

    with pytest.raises(UserError, match=r"Returns\.forward returned cannot be differentiated \("):
        run_sanity_check(tasks, Returns(model, make))


def test_numbers_are_not_rounded_to_the_loss_of_bfloat16():
    result = TaskResult(torch.ones((), dtype=torch.bfloat16), {"count": 1001})
    learner = Returns(nn.Linear(1, 1), None).train()
    assert as_task_result(result, learner).metrics["count"].item() == 1001


def test_metrics_have_no_gradient(tasks, model):
    learner = Returns(model, lambda loss: TaskResult(loss, {"twice": 2 * loss}))
    episode = tasks.sample(task_keys(0, "train", 0, range(1))[0])
    result = as_task_result(learner(episode), learner)
    assert result.loss.requires_grad and not result.metrics["twice"].requires_grad


def test_a_class_without_its_method_is_one_sentence(tasks, model):
    class Empty(Learner):
        pass

    class NoTrajectory(InnerLoopLearner):
        def train_task(self, episode):
            return self.evaluate_task(episode)

    with pytest.raises(UserError, match="Empty has no forward of its own"):
        run_sanity_check(tasks, Empty(model))
    with pytest.raises(UserError, match="NoTrajectory has no trajectory of its own"):
        run_sanity_check(tasks, NoTrajectory(model))


class PredictsNothing(MAML):
    def predict(self, parameters, inputs):
        super().predict(parameters, inputs)


class StartsFromNothing(MAML):
    def initial(self):
        super().initial()


@pytest.mark.parametrize(
    ("learner", "method"), [(PredictsNothing, "predict"), (StartsFromNothing, "initial")]
)
def test_a_method_without_a_return_is_named(tasks, model, learner, method):
    message = rf"of {learner.__name__} is None, in a train .* end with return \({method}\)"
    with pytest.raises(UserError, match=message):
        run_sanity_check(tasks, learner(model))


def test_what_a_users_model_does_not_implement_keeps_its_line(tasks):
    class Unfinished(Conv4):
        def forward(self, images):
            raise NotImplementedError("attention")

    learner = MAML(Unfinished(tasks.input_shape, tasks.outputs, filters=4))
    with pytest.raises(RuntimeError, match=r"test_sanity_check\.py:\d+, in forward.*attention"):
        run_sanity_check(tasks, learner)


def test_adaptation_in_evaluation_without_gradients_is_found(tasks, model):
    class Adapts(MAML):
        batches_tasks = False

        def evaluate_task(self, episode):
            loss = self.loss(self.model(episode.support.inputs), episode.support.targets)
            torch.autograd.grad(loss, list(self.model.parameters()))

    with pytest.raises(RuntimeError, match=r"gradients are disabled: adapt within torch\.enable"):
        run_sanity_check(tasks, Adapts(model))


@pytest.mark.parametrize(
    "taken",
    [
        *("loss", "mse", "ci95", "tasks", "gradient_norm", "learning_rate", "non_finite"),
        *("samples_per_second", "tasks_per_second", "seconds", "iteration"),
    ],
)
def test_a_metric_of_a_reserved_name_is_one_sentence(tasks, model, taken):
    learner = Returns(model, lambda loss: TaskResult(loss, {"accuracy": 1.0, taken: 0.5}))
    with pytest.raises(UserError, match=f'the metric "{taken}", a name .*: give it another name'):
        run_sanity_check(tasks, learner)


def test_an_evaluation_without_the_metric_is_one_sentence(tasks, model):
    learner = Returns(model, lambda loss: loss)
    learner.metrics = lambda predictions, targets: {"mine": 1.0}
    with pytest.raises(UserError, match=r"metrics \['mine'\] in evaluation, which lack \"accuracy"):
        run_sanity_check(tasks, learner)


@pytest.mark.parametrize(
    ("make", "metrics"),
    [
        (lambda loss: loss, {}),
        (lambda loss: TaskResult(loss, {"a": 0.5, "b": 2}), {"a": 0.5, "b": 2.0}),
        (lambda loss: TaskResult(loss, {"a": torch.ones(1)}), {"a": 1.0}),
    ],
)
def test_a_bare_loss_and_plain_numbers_are_accepted(tasks, model, make, metrics):
    learner = Returns(model, make)
    run_sanity_check(tasks, learner)
    results = []
    for size in (1, 2):
        mapper = TrainMapper(WorkerLocal(f"plain numbers {size}", tasks), "cpu")
        results.append(mapper(learner, MetaBatch(task_keys(0, "train", 1, range(size)))))
    for result in results:
        assert {name: value.item() for name, value in result.metrics.items()} == metrics
        assert result.loss.requires_grad


def test_parameters_and_running_statistics_stay_as_they_are(tasks):
    model = Conv4(tasks.input_shape, tasks.outputs, filters=4, running_statistics=True)
    learner = MAML(model)
    before = {name: each.clone() for name, each in learner.state_dict().items()}
    run_sanity_check(tasks, learner)
    assert len(before) > 12
    assert all(torch.equal(each, before[name]) for name, each in learner.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tuple, "gives a tuple as a task: return metadist.tasks.Episode"),
        (
            on_queries(lambda x, y: (x.numpy(), y)),
            r"gives query\.inputs of type ndarray: give a te",
        ),
        (
            on_queries(lambda x, y: (x.double(), y)),
            r"of torch\.float64, and the model's parameters",
        ),
        (lambda episode: Episode(*map(tuple, episode)), "gives a tuple, a tuple as a task"),
        (on_queries(lambda x, y: (x + torch.rand(1), y)), "gives two different tasks for one key"),
        (
            on_queries(lambda x, y: (x, y[:, 0])),
            r"targets have the shape \(4,\): a regression data",
        ),
        (on_queries(lambda x, y: (x, y.repeat(1, 2))), r"targets have the shape \(4, 2\)"),
        (on_queries(lambda x, y: (x, y.long())), "int64: give floating-point numbers for regr"),
        (on_queries(lambda x, y: (x[:0], y[:0])), "gives a train task without queries"),
    ],
)
def test_a_wrong_task_is_one_sentence(change, message):
    if change is tuple:
        change = lambda episode: ((0, 1), (2, 3))  # noqa: E731
    learner = MAML(MLP((1,), 1, [4], batch_norm=False), regression=True)
    with pytest.raises(UserError, match=message):
        run_sanity_check(lines(change), learner)


class OwnTasks:
    """A distribution of the user's own, of tasks of a dataset of metadist."""

    def __init__(self, tasks, change) -> None:
        self.dataset, self.inner, self.change = tasks.dataset, tasks, change
        self.input_shape, self.outputs = tasks.input_shape, tasks.outputs
        self.regression = tasks.regression

    def sample(self, key):
        support, query = self.inner.sample(key)
        return Episode(support, Examples(query.inputs, self.change(query.targets)))

    def protocol(self):
        return {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y.float(), r"OwnTasks gives query\.targets of torch\.float32"),
        (lambda y: y.bernoulli_(0.5), r"OwnTasks gives two different tasks .* from key_generator"),
    ],
)
def test_errors_of_a_distribution_name_it_and_not_its_dataset(tasks, model, change, message):
    with pytest.raises(UserError, match=message):
        run_sanity_check(OwnTasks(tasks, change), MAML(model))


def test_an_index_error_in_the_users_code_shows_the_outputs_of_the_model(tasks):
    class Own(MAML):
        def train_task(self, episode):
            return super().train_task(episode)

    too_few = MLP(tasks.input_shape, tasks.outputs - 1, [4])
    with pytest.raises(RuntimeError, match=r"IndexError: .* shape \(6, 2\), and the task has 3"):
        run_sanity_check(tasks, Own(too_few))


class Batched(Learner):
    """A learner of batched tasks; `change` may break what it returns in training."""

    batches_tasks = True

    def __init__(self, model, change=lambda learner, episode, result: result):
        super().__init__(model)
        self.change = change

    def forward(self, episode):
        predictions = self.model(episode.query.inputs)
        loss = self.loss(predictions, episode.query.targets)
        metrics = self.metrics(predictions, episode.query.targets)
        result = TaskResult(loss, metrics, None if self.training else predictions)
        return self.change(self, episode, result) if self.training else result


def mixed_up(learner, episode, result):
    """The mean of the inputs is taken over tasks, where a single task has it over examples."""
    predictions = learner.model(episode.query.inputs - episode.query.inputs.mean(0))
    return result._replace(loss=learner.loss(predictions, episode.query.targets))


def noisy(learner, episode, result):
    return result._replace(loss=result.loss * (1 + 0.1 * torch.rand(())))


def check_batched(tasks, change) -> None:
    torch.manual_seed(0)
    learner = Batched(MLP(tasks.input_shape, 3, hidden=[4], batch_norm=False), change)
    strategy = LocalStrategy(DimPartitioner(0), MeanReducer())
    check_before_training(strategy, tasks, learner, TRAINER, "float32")


def depends_on_their_number(learner, episode, result):
    """As an inner step along the gradient of the mean over tasks, shorter with more tasks."""
    return result._replace(loss=result.loss / result.loss.numel())


@pytest.mark.parametrize("change", [mixed_up, noisy, depends_on_their_number])
def test_batched_tasks_that_depend_on_each_other_are_refused(tasks, change):
    message = r"batches_tasks=True, and the loss of a train task changes with the"
    with pytest.raises(UserError, match=message):
        check_batched(tasks, change)


class Masked(Batched):
    """Its predictions are minus infinity for one class, and change with the other tasks."""

    batches_tasks = True

    def forward(self, episode):
        result = super().forward(episode)
        if self.training:
            return result
        predictions = result.predictions - result.predictions[:1]
        return result._replace(
            predictions=torch.cat([predictions[..., :2], predictions[..., 2:] - torch.inf], -1)
        )


def test_infinite_predictions_do_not_hide_that_batched_tasks_depend_on_each_other(tasks):
    learner = Masked(MLP(tasks.input_shape, 3, hidden=[4], batch_norm=False))
    strategy = LocalStrategy(DimPartitioner(0), MeanReducer())
    with pytest.raises(UserError, match=r"the predictions of a \w+ task changes with the other"):
        check_before_training(strategy, tasks, learner, TRAINER, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _, __, result: result.loss, None),
        (lambda _, __, result: result._replace(metrics={"half": 0.5}), None),
        (
            lambda _, __, result: result._replace(loss=result.loss.mean()),
            r"a loss of shape \(\): return a tensor of shape \(2,\), a value per task",
        ),
        (
            lambda _, __, result: result._replace(metrics={"half": torch.tensor(0.5)}),
            r"metrics that lack the dimension of tasks \(\{'half': \(\)\}\)",
        ),
    ],
)
def test_results_of_batched_tasks_have_a_value_for_each_task(tasks, change, message):
    if message is None:
        check_batched(tasks, change)
        return
    with pytest.raises(UserError, match=message):
        check_batched(tasks, change)


def test_an_error_in_batched_tasks_says_that_they_are_batched(tasks):
    def for_one_task(learner, episode, result):
        (queries,) = episode.query.targets.shape
        return result._replace(loss=result.loss / queries)

    with pytest.raises(RuntimeError, match=r"values to unpack .* \(in a batch of two train tasks"):
        check_batched(tasks, for_one_task)


class OwnMetric(MAML):
    """Overrides a method, and so loses the batched tasks of MAML."""

    def metrics(self, predictions, targets, suffix=""):
        return super().metrics(predictions, targets, suffix)


class OwnProtocol(MAML):
    """Keeps the batched tasks of MAML."""

    def protocol(self):
        return {}


class OwnModel(nn.Sequential):
    """A model of the user's own, without `supports_batched_tasks`."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 3))


class OwnMLP(MLP):
    """Keeps the batched tasks of MLP."""


class Declines(OwnModel):
    supports_batched_tasks = False


def mlp(kind=MLP, **options) -> MLP:
    return kind((1, 28, 28), 3, hidden=[4], batch_norm=False, **options)


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (lambda: OwnMetric(mlp()), "batches_tasks of OwnMetric"),
        (
            lambda: Returns(OwnModel(), lambda loss: loss),
            "batches_tasks of Returns and supports_batched_tasks of OwnModel",
        ),
        (lambda: MAML(OwnModel()), "supports_batched_tasks of OwnModel"),
        (lambda: MAML(Declines()), ""),
        (lambda: MAML(mlp(OwnMLP, dropout=0.5)), ""),
        (lambda: MAML(mlp(dropout=0.5)), ""),
        (lambda: OwnProtocol(mlp()), ""),
    ],
)
def test_own_classes_that_do_not_batch_tasks_are_reported(tasks, caplog, make, missing):
    caplog.set_level("INFO")
    strategy = LocalStrategy(DimPartitioner(0), MeanReducer())
    check_before_training(strategy, tasks, make(), TRAINER, "float32")
    message = (
        "tasks are computed one at a time, which is slower for small tasks: if the methods accept "
        f"batched tasks, set {missing} to True"
    )
    assert [record.getMessage() for record in caplog.records] == [message] * bool(missing)


class NumberedProtocol(Sinusoid):
    def protocol(self):
        return {1: "sinusoid"}


class NoProtocol(MAML):
    def protocol(self):
        super().protocol()


@pytest.mark.parametrize(
    ("dataset", "algorithm", "message"),
    [
        (
            NumberedProtocol,
            MAML,
            r"NumberedProtocol\.protocol returned \{1: 'sinusoid'\}: return a",
        ),
        (Sinusoid, NoProtocol, r"NoProtocol\.protocol returned None: return a dict"),
    ],
)
def test_a_protocol_that_cannot_be_saved_is_refused(dataset, algorithm, message):
    tasks = FewShotTasks(dataset(), shots=2, queries=2)
    learner = algorithm(MLP(tasks.input_shape, tasks.outputs, [4]), regression=True)
    strategy = LocalStrategy(DimPartitioner(0), MeanReducer())
    with pytest.raises(UserError, match=message):
        check_before_training(strategy, tasks, learner, TRAINER, "float32")
