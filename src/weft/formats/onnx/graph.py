"""An ONNX graph, built node by node: its values are known by their names, its weights by theirs in the module.

Opset 17 is the first with LayerNormalization; ONNX Runtime reads it since version 1.12, of 2022.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

OPSET, IR_VERSION = 17, 8
MAX_BYTES = 2**31 - 2**24  # of weights in one file; protobuf's limit is 2 GB

Shape = Sequence[int | str]  # a name stands for a dimension of any size


class Graph:
    """The nodes, weights and constants of a graph that computes what a module does; each weight is in it once."""

    def __init__(self, module: nn.Module) -> None:
        self._weight_names = {id(weight): name for name, weight in module.named_parameters()}
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: dict[str, onnx.TensorProto] = {}

    def add(self, operator: str, *inputs: str, **attributes: object) -> str:
        """Add a node with one output, and return the name of that."""
        name = f"{operator}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [name], name, **attributes))
        return name

    def weight(self, weight: Tensor, part: int = 0, parts: int = 1, transposed: bool = False) -> str:
        """Return the name of a weight, or of one of several parts that are stacked in it.

        A transposed weight that is there as it is, as tied embeddings are, is transposed by a node.
        """
        own_name = self._weight_names[id(weight)] + (f".{part}" if parts > 1 else "")
        if transposed and own_name in self._tensors:
            return self.add("Transpose", own_name, perm=[1, 0])
        name = own_name + (".T" if transposed else "")
        if name not in self._tensors:
            value = weight.detach().chunk(parts)[part].float()
            self._add_tensor(name, (value.t() if transposed else value).contiguous().cpu().numpy())
        return name

    def floats(self, *values: float) -> str:
        """Return the name of a float32 constant: a number, or a vector of several."""
        return self._constant("float", np.array(values if len(values) > 1 else values[0], np.float32))

    def number(self, value: int) -> str:
        """Return the name of an int64 constant, a number."""
        return self._constant("number", np.array(value, np.int64))

    def numbers(self, *values: int) -> str:
        """Return the name of an int64 constant, a vector: a shape, axes, or limits of a slice."""
        return self._constant("numbers", np.array(values, np.int64))

    def _constant(self, kind: str, value: np.ndarray) -> str:
        name = "_".join([kind, *map(str, value.ravel().tolist())])
        if name not in self._tensors:
            self._add_tensor(name, value)
        return name

    def _add_tensor(self, name: str, value: np.ndarray) -> None:
        self._tensors[name] = numpy_helper.from_array(value, name)

    def save(self, path: Path, inputs: Mapping[str, Shape], outputs: Mapping[str, tuple[str, Shape]]) -> None:
        """Write the model, and check it; `outputs` has the value and the shape of each.

        Weights of more than 2 GB are in a file of their own beside it.
        """
        named = [helper.make_node("Identity", [value], [name], name) for name, (value, _) in outputs.items()]
        ids = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in inputs.items()]
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, (_, shape) in outputs.items()]
        graph = helper.make_graph([*self._nodes, *named], path.stem, ids, values, list(self._tensors.values()))
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="weft"
        )
        is_large = sum(len(tensor.raw_data) for tensor in self._tensors.values()) > MAX_BYTES
        onnx.save_model(model, path, save_as_external_data=is_large, location=f"{path.name}_data")
        onnx.checker.check_model(path, full_check=True)
