import collections
import io
import pickle
import struct

import numpy as np
import pytest

from metadist.errors import UserError
from metadist.tasks import restricted_pickle

GENERATOR = np.random.default_rng(0)
LARGE = GENERATOR.integers(0, 256, (500, 200), dtype=np.uint8)
DATA = {
    "large": LARGE,
    "small": np.arange(6).reshape(2, 3),
    "by column": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "big endian": np.arange(3, dtype=">i4"),
    "no rows": np.zeros((0, 3), dtype=np.float32),
    "scalar": np.int64(-5),
    "numbers": [0, 255, 256, 65536, -1, 2**31, -(2**70), 1.5, True, False, None],
    "strings": ["", "è" * 300, b"", b"abc", b"\xff" * 300, "x" * 100_000],
    "containers": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}, [[1], {"a": (2,)}]],
    "ordered": collections.OrderedDict(b=1, a=2),
    "default": collections.defaultdict(list, a=[1]),
}


def same(found, expected):
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
        assert not found.flags.writeable
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            same(found[key], value)
    else:
        assert found == expected


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_what_python_writes(protocol):
    same(restricted_pickle.load(pickle.dumps(DATA, protocol), "data"), DATA)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_is_one_object_stays_one(protocol):
    shared = [1]
    data = pickle.dumps({"a": shared, "b": shared, "c": LARGE, "d": LARGE}, protocol)
    found = restricted_pickle.load(data, "data")
    assert found["a"] is found["b"]
    assert found["c"] is found["d"]
    same(found["c"], LARGE)


def string(data):
    """A string as Python 2 writes it."""
    return b"T" + struct.pack("<I", len(data)) + data


def test_reads_what_python_2_writes():
    """Like the published caches: cPickle, protocol 2, strings of bytes."""
    raw = LARGE.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b\x87Rq\x04"
        b"(K\x01K\xc8M\xf4\x01\x86cnumpy\ndtype\nq\x05U\x02u1K\x00K\x01\x87Rq\x06"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + string(raw) + b"tb"
    )
    names = b"U\x05names(U\x06caf\xe9 oK\x07lu"  # a list made at once, then the dictionary filled
    data = b"\x80\x02}q\x01(U\x05image" + array + names + b"."
    found = restricted_pickle.load(data, "data")
    assert set(found) == {"image", "names"}
    assert found["names"] == [b"caf\xe9 o", 7]
    assert np.array_equal(found["image"], LARGE.reshape(200, 500))
    expected = pickle.loads(data, encoding="latin-1")
    assert np.array_equal(expected["image"], found["image"])


def test_arrays_stay_in_the_file(tmp_path):
    path = tmp_path / "data.pkl"
    path.write_bytes(pickle.dumps({"large": LARGE}, 4))
    found = restricted_pickle.load_file(path)["large"]
    assert not found.flags.owndata
    assert type(found.base).__name__ == "mmap"
    assert np.array_equal(found, LARGE)


def an_object():
    return io.StringIO("text")


@pytest.mark.parametrize(
    ("value", "message_part"),
    [
        (print, "names builtins.print"),
        (an_object(), "names _io.StringIO"),
        (np.array([{}], dtype=object), "array of type O8"),
        (np.zeros(1, dtype=[("a", "i4")]), "array of type V4"),
        (np.array(["one", "three"]), "array of type U5"),
        ({(1, 2): 3}, "a key of type tuple"),
        ({1.5: 3}, "a key of type float"),
        ({2**61 - 1: 3}, "a key of type int"),  # hashes of such keys collide
        ({1, 2}, "instruction"),
        (pickle.PickleBuffer(b"abc"), None),
        (collections.Counter("abc"), "names collections.Counter"),
        (np.random.default_rng(0), "names numpy.random"),
    ],
)
@pytest.mark.parametrize("protocol", [4, 5])
def test_everything_else_is_refused(value, message_part, protocol):
    if isinstance(value, pickle.PickleBuffer):
        if protocol < 5:
            return
        data, message_part = pickle.dumps(value, 5, buffer_callback=lambda _: False), "instruction"
    else:
        data = pickle.dumps(["before", value], protocol)
    with pytest.raises(UserError) as error:
        restricted_pickle.load(data, "some.pkl")
    message = str(error.value)
    assert message.startswith("some.pkl ")
    assert message_part in message
    assert "\n" not in message
    assert "nothing in it was executed" in message


HEAD = b"\x80\x02"


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"cos\nsystem\nU\x04trueq\x85R.",
        HEAD + b"cnumpy\nndarray\n)R.",  # a name that is only to be named
        HEAD + b"cos\nsys\ntem\n.",
        HEAD + b"cos" + b"x" * 1000 + b"\nsystem\n.",
        HEAD + b"(ios\nsystem\nU\x04true.",  # INST
        HEAD + b"(cos\nsystem\nU\x04trueo.",  # OBJ
        HEAD + b"\x82\x01.",  # an extension by number
        HEAD + b"U\x01xQ.",  # a persistent name
        HEAD + b"]}b.",  # attributes of a list
        HEAD + b"U\x01x)R.",  # a call of text
        HEAD + b"}K\x01a.",  # a dictionary filled as a list
        HEAD + b"](K\x01K\x02u.",
        HEAD + b"](K\x01u.",
        HEAD + b"}(]K\x01u.",  # a key that cannot be one
        HEAD + b"})" + b"\x85" * 100_000 + b"Ns.",  # one whose hash has no bottom
        HEAD + b")" + b"\x85" * 2000 + b"N\x93.",  # a name whose text has none
        HEAD + b"h\x07.",
        HEAD + b"a.",
        HEAD + b"\x87.",
        HEAD + b"t.",
        HEAD + b".",
        HEAD + b"T\xff\xff\xff\x7fabc.",
        HEAD + b"\x8e" + b"\xff" * 8 + b"abc.",
        HEAD + b"X\x02\x00\x00\x00\xff\xff.",
        HEAD + b"c_codecs\nencode\n(U\x01xU\x03hextR.",
        b"",
        b"not a pickle",
    ],
)
def test_malicious_pickles_are_refused(data):
    with pytest.raises(UserError) as error:
        restricted_pickle.load(data, "some.pkl")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    "state",
    [
        (1, (3, 4), np.dtype("u1"), False, b"too short"),
        (1, (3,), np.dtype("u1"), False, b"too long"),
        (1, (-1,), np.dtype("u1"), False, b""),
        (1, (2**62, 4), np.dtype("u1"), False, b"abcd"),
        (1, (3,), None, False, b"abc"),
        (1, (3,), np.dtype("u1"), False, [1, 2, 3]),
        (1, (3,)),
    ],
)
def test_arrays_that_do_not_fit_their_bytes(state):
    rebuild = np.zeros(1).__reduce__()
    data = pickle.dumps(_Reduced((rebuild[0], rebuild[1], state)), 2)
    with pytest.raises(UserError):
        restricted_pickle.load(data, "some.pkl")


class _Reduced:
    def __init__(self, parts) -> None:
        self.parts = parts

    def __reduce__(self):
        return self.parts


@pytest.mark.parametrize("values", [[], [3, -1], (5,), np.arange(4, dtype=np.uint8)])
@pytest.mark.parametrize("protocol", [2, 5])
def test_integers(values, protocol):
    found = restricted_pickle.load(pickle.dumps({"a": {"b": values}}, protocol), "data")["a"]["b"]
    integers = restricted_pickle.to_integers(found, 4)
    assert integers.dtype == np.int64
    assert integers.tolist() == list(values)


def nested(kind, levels):
    """2 ** levels elements in a few bytes: each level has the one below twice."""
    value = kind([1, 2])
    for _ in range(levels):
        value = kind([value, value])
    return value


@pytest.mark.parametrize(
    "values",
    [
        nested(list, 100),
        [nested(list, 100)] * 3,
        [1.5, 2.0],
        ["1", "2"],
        [True, False],
        range(3),
        "123",
        None,
        [1] * 1000,
        np.arange(1000),
        np.zeros((2, 2), dtype=np.int64),
        np.zeros(2),
    ],
    ids=range(12),
)
def test_anything_but_a_few_integers_is_refused(values):
    with pytest.raises((TypeError, ValueError)) as error:
        restricted_pickle.to_integers(values, 999)
    assert len(str(error.value)) < 200


# With `pickle.Unpickler` and an allow-list in `find_class`, the first takes 2 ** 100 steps and the
# next two overflow the C stack.
@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"})q\0" + b"h\0\x86q\0" * 100 + b"Ns.",
        HEAD + b"})" + b"\x85" * 300_000 + b"Ns.",
        HEAD + b"\x8f()" + b"\x85" * 300_000 + b"\x90.",
    ],
    ids=["shared tuples as a key", "deep tuple as a key", "deep tuple in a set"],
)
def test_crafted_pickles_are_refused(data):
    with pytest.raises(UserError):
        restricted_pickle.load(data, "some.pkl")


@pytest.mark.parametrize("text", ["O8", "O"])
def test_raw_pointers_are_no_array(text):
    """NumPy's own constructors accept an object array whose type says that it has no objects."""
    dtype = _Reduced((np.dtype, (text, False, True), (3, "|", None, None, None, -1, -1, 0)))
    rebuild = np.zeros(1).__reduce__()
    array = _Reduced((*rebuild[:2], (1, (1,), dtype, False, b"AAAAAAAA")))
    with pytest.raises(UserError, match=f"array of type {text}"):
        restricted_pickle.load(pickle.dumps({"a": array}, 4), "some.pkl")


def test_nested_shapes_are_not_compared():
    shape = (nested(list, 100), nested(list, 100))
    rebuild = np.zeros(1).__reduce__()
    array = _Reduced((*rebuild[:2], (1, shape, np.dtype("u1"), False, b"abc")))
    with pytest.raises(UserError, match="no tuple of sizes"):
        restricted_pickle.load(pickle.dumps({"a": array}, 4), "some.pkl")


def test_the_number_of_reads_is_limited(monkeypatch):
    monkeypatch.setattr(restricted_pickle, "MAX_READS", 1000)
    with pytest.raises(UserError, match="more than 1,000 reads"):
        restricted_pickle.load(HEAD + b"]" * 2000 + b".", "some.pkl")


def test_lists_of_arrays_may_take_more_reads_and_their_arrays_stay_in_the_file(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(restricted_pickle, "MAX_READS", 10)
    path = tmp_path / "images.pkl"
    path.write_bytes(pickle.dumps([LARGE[:20].copy() + row for row in range(8)], 4))
    arrays = restricted_pickle.load_arrays(path)
    assert len(arrays) == 8 and np.array_equal(arrays[3], LARGE[:20] + 3)
    assert {type(each.base).__name__ for each in arrays} == {"mmap"}  # of 4 kB each
    monkeypatch.setattr(restricted_pickle, "MAX_LIST_READS", 50)
    with pytest.raises(UserError, match="more than 50 reads"):
        restricted_pickle.load_arrays(path)


def test_text_is_not_encoded_again_and_again():
    text = b"X" + struct.pack("<I", 1000) + b"a" * 1000 + b"q\x00"
    call = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    stream = (
        b"\x80\x02}("
        + b"U\x01t"
        + text
        + b"".join(b"U" + bytes([2]) + b"%02d" % number + call for number in range(50))
        + b"u."
    )
    with pytest.raises(UserError, match="encodes more than its own 2,"):
        restricted_pickle.load(stream, "file")
