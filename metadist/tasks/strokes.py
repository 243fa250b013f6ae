"""The geometry of invented handwriting: characters as pen strokes, and ways to write them.

A character is two to four strokes, in the spirit of the strokes that people drew for Omniglot
(Lake et al. 2015, doi 10.1126/science.aab3050): straight lines, arcs and wiggles, more than half
of which begin on the stroke before. Half a character's larger side is 1; y points downwards.

Shape suffixes: C classes, E examples, S strokes, K control points a stroke, P pen positions a
stroke, N random numbers, 2 for x and y.
"""

from typing import NamedTuple

import numpy as np

STROKES = 4
CONTROLS = 5
POSITIONS = 28

# How much one writing differs from another: standard deviations, in units of half a character
# (lengths), radians (angle) or as a ratio (slant, scale). With these values the nearest neighbour
# in pixels finds one class of five from one example in 59 cases of 100, a linear embedding in 71,
# (1000 training steps) and a convolutional one in 95 (1350 steps).
JITTER = 0.05
STROKE_SHIFT = 0.075
ANGLE = 0.17
SLANT = 0.17
SCALE = 0.16
SHIFT = 0.11

_STROKE_NUMBERS = 9 + CONTROLS
_CLASS_NUMBERS = 1 + STROKES * _STROKE_NUMBERS
_EXAMPLE_NUMBERS = 7 + STROKES * (2 + 2 * CONTROLS)
_STREAM = 0x676C797068
"""Keeps these random numbers apart from those of task keys."""


class Writing(NamedTuple):
    """Pen strokes of several characters, each written several times.

    Attributes:
        positions: float64 (C, E, S * P, 2), where the pen was; the page spans about [-1, 1].
        lengths: float64 (C, E, S * P), the length of stroke that a position stands for; zero for
            the strokes that a character does not have.
        thickness: float64 (C, E), from 0 (thinnest pen) to 1 (thickest).
    """

    positions: np.ndarray
    lengths: np.ndarray
    thickness: np.ndarray


def write(keys: list[tuple[int, ...]], examples: int) -> Writing:
    """Invent one character a key and write each several times.

    Args:
        keys: what a character follows from: it and its n-th example are the same whatever the
            other keys and the number of examples. Numbers must not be negative.
        examples: how often each is written.
    """
    character_CN = np.empty((len(keys), _CLASS_NUMBERS))
    hand_CEN = np.empty((len(keys), examples, _EXAMPLE_NUMBERS))
    for row, key in enumerate(keys):
        # Two streams, so that neither moves when the other takes more numbers.
        character_CN[row] = np.random.default_rng([_STREAM, *key, 1]).random(_CLASS_NUMBERS)
        np.random.default_rng([_STREAM, *key, 2]).standard_normal(out=hand_CEN[row])
    control_CSK2, present_CS = _characters(character_CN)
    position_CESP2 = _SPLINE_PK @ _by_hand(control_CSK2, hand_CEN[..., 1:])
    step_CESP = np.sqrt((np.diff(position_CESP2, axis=-2) ** 2).sum(axis=-1))
    # A position stands for half of the way to either neighbour.
    length_CESP = np.zeros(position_CESP2.shape[:-1])
    length_CESP[..., :-1] += step_CESP / 2
    length_CESP[..., 1:] += step_CESP / 2
    length_CESP *= present_CS[:, None, :, None]
    shape = (len(keys), examples, STROKES * POSITIONS)
    return Writing(
        positions=position_CESP2.reshape(*shape, 2),
        lengths=length_CESP.reshape(shape),
        thickness=0.5 + 0.5 * np.tanh(hand_CEN[..., 0]),
    )


def _characters(uniform_CN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Control points (C, S, K, 2) from uniform numbers, and which strokes there are (C, S)."""
    strokes_C = 2 + np.digitize(uniform_CN[:, 0], [0.4, 0.8])
    present_CS = np.arange(STROKES) < strokes_C[:, None]
    stroke_CSN, bend_CSK = np.split(
        uniform_CN[:, 1:].reshape(-1, STROKES, _STROKE_NUMBERS), [9], axis=-1
    )
    kind, side, bend, eighth, slope, length, joined, across, along = np.moveaxis(stroke_CSN, -1, 0)

    # How far the pen turns at each control point: hardly, steadily (arcs), or anyhow (wiggles).
    straight, arc = kind < 0.3, kind < 0.75
    steady_CS = np.where(straight, 0.12, np.where(arc, 0.3 + 0.75 * bend, 0.2))
    wiggle_CS = np.where(straight, 0.1, np.where(arc, 0.3, 1.5))
    turn_CSK = (np.where(side < 0.5, -1, 1) * steady_CS)[..., None]
    turn_CSK = turn_CSK + wiggle_CS[..., None] * (2 * bend_CSK - 1)
    # Strokes begin near a multiple of 45 degrees, and not parallel to the stroke before.
    eighths_CS = np.cumsum(np.array([1, 2, 3, 5, 6, 7])[(6 * eighth).astype(int)], axis=1)
    first_CS = np.pi / 4 * (eighths_CS + 0.6 * (slope - 0.5))
    heading_CSK = first_CS[..., None] + np.cumsum(turn_CSK, axis=-1) - turn_CSK[..., :1]
    stride_CS = (0.5 + 0.9 * length) / (CONTROLS - 1)
    step_CSK2 = np.stack([np.cos(heading_CSK), np.sin(heading_CSK)], axis=-1)
    control_CSK2 = np.cumsum(step_CSK2 * stride_CS[..., None, None], axis=-2)

    # Where strokes lie: somewhere, or with an end or the middle on the stroke before.
    rows = np.arange(len(uniform_CN))
    for s in range(STROKES):
        shape_CK2 = control_CSK2[:, s]
        move_C2 = np.stack([across[:, s], along[:, s]], axis=-1) - 0.5 - shape_CK2.mean(axis=1)
        if s > 0:
            theirs_C = (CONTROLS * across[:, s]).astype(int)
            own_C = np.where(along[:, s] < 0.65, 0, CONTROLS // 2)
            joint_C2 = control_CSK2[rows, s - 1, theirs_C] - shape_CK2[rows, own_C]
            move_C2 = np.where(joined[:, s, None] < 0.6, joint_C2, move_C2)
        control_CSK2[:, s] = shape_CK2 + move_C2[:, None]
    return _fitted(control_CSK2, present_CS), present_CS


def _fitted(control_CSK2: np.ndarray, present_CS: np.ndarray) -> np.ndarray:
    """Characters moved and scaled so that the larger side spans [-1, 1]."""
    absent = ~present_CS[..., None, None]
    low_C2 = np.where(absent, np.inf, control_CSK2).min(axis=(1, 2))
    high_C2 = np.where(absent, -np.inf, control_CSK2).max(axis=(1, 2))
    half_C1 = (high_C2 - low_C2).max(axis=1, keepdims=True) / 2
    centre_C2 = (low_C2 + high_C2) / 2
    return (control_CSK2 - centre_C2[:, None, None]) / half_C1[:, None, None]


def _by_hand(control_CSK2: np.ndarray, normal_CEN: np.ndarray) -> np.ndarray:
    """Control points as written, (C, E, S, K, 2), from standard normal numbers."""
    whole, shift, jitter = np.split(normal_CEN, [6, 6 + 2 * STROKES], axis=-1)
    examples = normal_CEN.shape[:2]
    control_CESK2 = (
        control_CSK2[:, None]
        + STROKE_SHIFT * shift.reshape(*examples, STROKES, 1, 2)
        + JITTER * jitter.reshape(*examples, STROKES, CONTROLS, 2)
    )
    angle, slant, wide, high, right, down = np.moveaxis(whole, -1, 0)[..., None, None]
    x = control_CESK2[..., 0] * np.exp(SCALE * wide) + control_CESK2[..., 1] * SLANT * slant
    y = control_CESK2[..., 1] * np.exp(SCALE * high)
    cos, sin = np.cos(ANGLE * angle), np.sin(ANGLE * angle)
    return np.stack([cos * x - sin * y + SHIFT * right, sin * x + cos * y + SHIFT * down], axis=-1)


def _spline() -> np.ndarray:
    """Catmull-Rom weights (P, K) of the control points in each pen position."""
    place_P = np.linspace(0, CONTROLS - 1, POSITIONS)
    segment_P = np.minimum(place_P.astype(int), CONTROLS - 2)
    t = place_P - segment_P
    weights = (-t + 2 * t**2 - t**3, 2 - 5 * t**2 + 3 * t**3, t + 4 * t**2 - 3 * t**3, t**3 - t**2)
    spline_PK = np.zeros((POSITIONS, CONTROLS))
    for offset, weight_P in enumerate(weights):
        # Beyond its ends a stroke is taken to stay where it is.
        control_P = np.clip(segment_P + offset - 1, 0, CONTROLS - 1)
        np.add.at(spline_PK, (np.arange(POSITIONS), control_P), weight_P / 2)
    return spline_PK


_SPLINE_PK = _spline()
