"""Tests of networks: heads, all kinds of observations, and convolutions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlframe.agents import DQN, PPO, DQNConfig, PPOConfig
from rlframe.agents.dqn_heads import Categories
from rlframe.agents.networks import Head, MLPConfig, NatureCNNConfig, _convolve, action_values, dueling_values
from rlframe.agents.recurrent import GRUConfig
from rlframe.errors import UsageError
from rlframe.types import has_channels_first
from tests.agents.batches import SMALL_CNN, random_tree

RNG = jax.random.PRNGKey(0)
VECTOR = specs.Array((3,), np.float32, "vector")
IMAGE = specs.BoundedArray((2, 36, 36), np.uint8, 0, 255, "image")


def outputs(config, spec, observation, heads=None):
    network = config.build(spec, heads or [Head(4)])
    return network.apply(network.init(RNG, observation), observation)


def test_mlp_matches_numpy_computation():
    network = MLPConfig(hidden=(5,), activation="tanh").build(VECTOR, (Head(2),))
    observation = np.array([[1.0, -2.0, 0.5]], np.float32)
    params = network.init(RNG, observation)
    layer, head = params["torso0_dense0"], params["head0"]
    expected = np.tanh(observation @ layer["w"] + layer["b"]) @ head["w"] + head["b"]
    np.testing.assert_allclose(network.apply(params, observation)[0], expected, rtol=1e-4, atol=1e-6)


def test_layer_norm_is_applied_before_activations():
    network = MLPConfig((5,), layer_norm=True).build(VECTOR, [Head(2)])
    observation = random_tree(VECTOR, (4,))
    params = network.init(jax.random.PRNGKey(0), observation)
    layer, norm, head = params["torso0_dense0"], params["torso0_dense_norm0"], params["head0"]
    norm = {"scale": norm["scale"] + 0.5, "offset": norm["offset"] - 0.2}
    hidden = observation @ layer["w"] + layer["b"]
    hidden = (hidden - hidden.mean(axis=1, keepdims=True)) / hidden.std(axis=1, keepdims=True)
    expected = np.tanh(1.5 * hidden - 0.2) @ head["w"] + head["b"]
    (output,) = network.apply({**params, "torso0_dense_norm0": norm}, observation)
    np.testing.assert_allclose(output, expected, rtol=1e-3, atol=1e-4)
    cnn = dataclasses.replace(SMALL_CNN, layer_norm=True).build(IMAGE, [Head(2)])
    names = jax.eval_shape(cnn.init, jax.random.PRNGKey(0), random_tree(IMAGE, (1,)))
    assert sum("norm" in name for name in names) == 4


def test_heads_have_separate_layers_only_if_separate_is_true():
    observation = np.zeros((1, 3), np.float32)
    separate = MLPConfig(separate=True).build(VECTOR, (Head(2), Head(1))).init(RNG, observation)
    shared = MLPConfig(separate=False).build(VECTOR, (Head(2), Head(1))).init(RNG, observation)
    assert {"torso0_dense0", "torso1_dense0"} <= separate.keys()
    assert {name for name in shared if name.startswith("torso")} == {"torso_dense0", "torso_dense1"}


def test_dueling_mlp_combines_advantages_and_value_from_separate_layers():
    network = MLPConfig((5, 4), "relu", separate=False, dueling=True).build(VECTOR, (action_values(2),))
    observation = random_tree(VECTOR, (6,))
    params = network.init(RNG, observation)
    assert params.keys() == {"torso_dense0", "torso0_dense0", "torso1_dense0", "head0", "head1"}

    def layer(name, inputs):
        return inputs @ np.asarray(params[name]["w"]) + np.asarray(params[name]["b"])

    shared = np.maximum(layer("torso_dense0", observation), 0.0)
    parts = [layer(f"head{i}", np.maximum(layer(f"torso{i}_dense0", shared), 0.0)) for i in range(2)]
    (values,) = network.apply(params, observation)
    expected = parts[1] + parts[0] - parts[0].mean(axis=1, keepdims=True)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_dueling_values_match_worked_example():
    advantages, value = jnp.array([[1.0, 3.0]] * 2), jnp.array([[10.0], [20.0]])
    np.testing.assert_allclose(dueling_values(advantages, value, 2), [[9, 11], [19, 21]])
    # With two numbers per action, the advantages and values of each number are separate.
    found = dueling_values(jnp.array([[1.0, 0.0, 3.0, 4.0]]), jnp.array([[10.0, 20.0]]), 2)
    np.testing.assert_allclose(found, [[9, 18, 11, 22]])


def test_orthogonal_weights_are_orthogonal_and_scaled():
    params = MLPConfig(hidden=(8,)).build(VECTOR, (Head(2, scale=0.01),)).init(RNG, np.zeros((1, 3), np.float32))
    rows = np.asarray(params["torso0_dense0"]["w"])  # The shape is [3, 8], so only the rows can be orthogonal.
    np.testing.assert_allclose(rows @ rows.T, 2.0 * np.eye(3), atol=1e-5)
    columns = np.asarray(params["head0"]["w"])
    np.testing.assert_allclose(columns.T @ columns, 1e-4 * np.eye(2), atol=1e-8)


def test_standard_deviation_of_truncated_normal_weights_is_one_over_the_root_of_the_inputs():
    config = MLPConfig(hidden=(2000,), orthogonal=False)
    weights = config.build(VECTOR, (Head(1),)).init(RNG, np.zeros((1, 3), np.float32))["torso0_dense0"]["w"]
    assert np.abs(weights).max() <= 2.0 / np.sqrt(3.0)
    # Truncation at two standard deviations multiplies the standard deviation by 0.88.
    np.testing.assert_allclose(np.std(weights), 0.88 / np.sqrt(3.0), rtol=0.05)


@pytest.mark.parametrize(
    ("config", "spec"), [(MLPConfig((4,), layer_norm=True), specs.Array((3,), np.float32)), (GRUConfig(size=4), None)]
)
def test_eager_init_equals_jitted_init_and_compiles_no_layer(config, spec, caplog):
    spec = specs.Array((3,), np.float32) if spec is None else spec
    network, observation = config.build(spec, (Head(2), Head(1))), random_tree(spec, (1,))
    with jax.log_compiles():
        eager = network.init(jax.random.PRNGKey(3), observation)
    assert "jit(dot" not in caplog.text and "jit(tanh" not in caplog.text
    jitted = jax.jit(network.init)(jax.random.PRNGKey(3), observation)  # Haiku's own `init`
    assert jax.tree.structure(eager) == jax.tree.structure(jitted)
    jax.tree.map(np.testing.assert_array_equal, eager, jitted)


def test_initial_weights_depend_only_on_the_random_key():
    network = MLPConfig().build(VECTOR, (Head(2),))
    first, again, other = (network.init(jax.random.PRNGKey(seed), np.zeros((1, 3), np.float32)) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["head0"]["w"], other["head0"]["w"])


def test_outputs_counted_by_num_free_do_not_depend_on_the_observation():
    observation = np.random.RandomState(0).randn(5, 3).astype(np.float32)
    result = outputs(MLPConfig(), VECTOR, observation, (Head(4, num_free=2, free_init=-0.5),))[0]
    np.testing.assert_allclose(result[:, 2:], np.full((5, 2), -0.5))
    assert np.std(result[:, 0]) > 0


def test_mlp_joins_the_leaves_of_an_observation_dict():
    spec = {"a": VECTOR, "b": specs.Array((2, 2), np.float32, "b"), "c": specs.DiscreteArray(5, name="c")}
    observation = {"a": np.zeros((6, 3), np.float32), "b": np.zeros((6, 2, 2), np.float32), "c": np.zeros(6, np.int32)}
    network = MLPConfig(hidden=(7,)).build(spec, (Head(4),))
    assert network.init(RNG, observation)["torso0_dense0"]["w"].shape == (3 + 4 + 5, 7)


def test_categories_are_encoded_as_one_hot_vectors():
    spec = specs.DiscreteArray(3)
    network = MLPConfig(hidden=()).build(spec, (Head(2),))
    observation = np.array([2, 0], np.int32)
    params = network.init(RNG, observation)
    expected = np.asarray(params["head0"]["w"])[[2, 0]]
    np.testing.assert_allclose(network.apply(params, observation)[0], expected, rtol=1e-6)


@pytest.mark.parametrize(("kernel", "stride", "size"), [(8, 4, 84), (4, 2, 20), (3, 1, 9), (4, 2, 11)])
def test_blockwise_convolution_equals_plain_convolution(kernel, stride, size):
    random = np.random.RandomState(0)
    image = jnp.asarray(random.randn(2, size, size, 3), jnp.float32)
    weights = jnp.asarray(random.randn(kernel, kernel, 3, 5), jnp.float32)
    plain = jax.lax.conv_general_dilated(
        image, weights, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(_convolve(image, weights, stride), plain, rtol=1e-4, atol=1e-4)


def test_images_with_channels_first_and_last_give_the_same_features():
    random = np.random.RandomState(0)
    first = random.randint(0, 256, (2, 2, 36, 36)).astype(np.uint8)
    last = np.moveaxis(first, 1, -1)
    spec = specs.BoundedArray((36, 36, 2), np.uint8, 0, 255)
    np.testing.assert_allclose(
        outputs(NatureCNNConfig(), IMAGE, first)[0], outputs(NatureCNNConfig(), spec, last)[0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.system
def test_image_bytes_are_scaled_to_at_most_one():
    image = np.random.RandomState(0).randint(0, 256, (2, 2, 36, 36)).astype(np.uint8)
    spec = specs.Array((2, 36, 36), np.float32, "image")
    scaled = outputs(NatureCNNConfig(), spec, (image / 255.0).astype(np.float32))[0]
    np.testing.assert_allclose(outputs(NatureCNNConfig(), IMAGE, image)[0], scaled, rtol=1e-4, atol=1e-5)


def test_vector_leaf_is_joined_with_the_output_of_the_convolutions():
    spec = {"image": IMAGE, "vector": VECTOR}
    network = NatureCNNConfig(hidden=(10,)).build(spec, (Head(2),))
    observation = {"image": np.zeros((1, 2, 36, 36), np.uint8), "vector": np.zeros((1, 3), np.float32)}
    assert network.init(RNG, observation)["torso_dense0"]["w"].shape == (64 + 3, 10)


def test_nature_cnn_has_the_number_of_parameters_of_the_paper():
    spec = specs.BoundedArray((4, 84, 84), np.uint8, 0, 255)
    network = NatureCNNConfig().build(spec, (Head(6),))
    shapes = jax.eval_shape(network.init, RNG, np.zeros((1, 4, 84, 84), np.uint8))
    # Mnih et al. 2015: convolutions 8x8x4x32, 4x4x32x64, 3x3x64x64, then a layer with 7 * 7 * 64 inputs and 512 units.
    expected = 8192 + 32 + 32768 + 64 + 36864 + 64 + 3136 * 512 + 512 + 512 * 6 + 6
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == expected


def test_dueling_nature_cnn_has_separate_hidden_layers_for_value_and_advantages():
    spec, cfg = specs.BoundedArray((4, 84, 84), np.uint8, 0, 255), DQNConfig(head=Categories(51))
    shapes = jax.eval_shape(DQN(cfg, spec, specs.DiscreteArray(6), NatureCNNConfig(dueling=True)).initial_params, RNG)
    # Wang et al. 2016, figure 1, with the 51 atoms of Hessel et al. 2018: only the convolutions are shared.
    convolutions = 8192 + 32 + 32768 + 64 + 36864 + 64
    streams = 2 * (3136 * 512 + 512) + 512 * 6 * 51 + 6 * 51 + 512 * 51 + 51
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == convolutions + streams


def test_dueling_network_rejects_heads_without_action_values():
    for config in (MLPConfig(dueling=True), GRUConfig(dueling=True)):
        with pytest.raises(UsageError, match=r"Only action values .* can be dueling"):
            config.build(VECTOR, (Head(2), Head(1)))


def test_cnn_rejects_a_vector_observation():
    with pytest.raises(UsageError, match=r"needs an observation with three axes.*MLPConfig"):
        NatureCNNConfig().build(VECTOR, (Head(2),))


@pytest.mark.parametrize(
    ("shape", "is_first"),
    [
        ((4, 84, 84), True),
        ((84, 84, 4), False),
        ((3, 210, 160), True),
        ((210, 160, 3), False),
        ((10, 10, 4), False),
        ((10, 10, 10), False),  # MinAtar's Seaquest
        ((10, 10, 16), False),  # four frames of MinAtar's Breakout
        ((16, 10, 10), True),
    ],
)
def test_channel_axis_differs_from_the_axes_of_a_square_image(shape, is_first):
    assert has_channels_first(shape) == is_first


@pytest.mark.parametrize("channels", [4, 10, 16])
def test_default_network_for_small_images_is_the_network_of_minatar(channels):
    spec = specs.BoundedArray((10, 10, channels), np.float32, 0, 1)
    for agent in (PPO(PPOConfig(), spec, specs.DiscreteArray(6)), DQN(DQNConfig(), spec, specs.DiscreteArray(6))):
        params = jax.eval_shape(agent.initial_params, RNG)
        assert params["~"]["torso_image0_w0"].shape == (3, 3, channels, 16)
        assert params["torso_dense0"]["w"].shape == (8 * 8 * 16, 128) and "torso_dense1" not in params
        assert params["head0"]["w"].shape == (128, 6)
    core = GRUConfig((8,), 4).build(spec, (Head(2),)).init(RNG, np.zeros((1, *spec.shape), np.float32))
    assert core["torso_dense0"]["w"].shape == (8 * 8 * 16, 8)


def test_cnn_rejects_an_image_smaller_than_the_kernels():
    with pytest.raises(UsageError, match=r"\(2, 16, 16\) is too small .* --network.kernels 3"):
        NatureCNNConfig().build(specs.Array((2, 16, 16), np.uint8), (Head(2),))


@pytest.mark.parametrize("make", [lambda: MLPConfig(activation="relo"), lambda: MLPConfig(hidden=(0,))])
def test_invalid_options_are_rejected(make):
    with pytest.raises(UsageError, match="MLPConfig"):
        make()
