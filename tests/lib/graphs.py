"""Saved graphs on the fake ComfyUI: widget values by position, links, and the run of every node."""

import inspect
import json
from typing import Any

import torch
from fastar_nodes.lab.training import picture_book
from flat_graphs import flat

# Widget types, as opposed to sockets.
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
# What the editor draws and the server never sees.
VIRTUAL = ("Note", "MarkdownNote")


def default(widget: Any) -> Any:
    """The value of a new node's widget: of a menu without a default its first entry."""
    about = widget.about
    return about["default"] if "default" in about else about["options"][0]


def widget_values(node: dict[str, Any], about: Any) -> dict[str, Any]:
    """Values of a saved node's widgets as the editor assigns them: by position; widgets added later take their
    defaults.

    Raises:
        AssertionError: the node has more values than its schema has widgets.
    """
    given, values = list(node["widgets_values"]), {}
    for widget in (i for i in about.inputs if i.kind in WIDGETS):
        values[widget.id] = given.pop(0) if given else default(widget)
        if widget.about.get("control_after_generate") and given:
            assert given.pop(0) in ("fixed", "randomize", "increment", "decrement"), node["type"]
    assert not given, f"{node['type']} has {len(given)} values more than widgets"
    return values


class Core:
    """The nodes of ComfyUI that the graphs use, as far as they use them."""

    def VAEDecode(self, samples, vae):
        return (vae.decode(samples["samples"]),)

    def VAEEncode(self, pixels, vae):
        return ({"samples": vae.encode(pixels)},)

    def PrimitiveInt(self, value, control=None):
        return (value,)

    def SeedNode(self, seed, control=None):
        return (seed,)

    def PrimitiveStringMultiline(self, value):
        return (value,)

    def SolidMask(self, value, width, height):
        return (torch.full((1, height, width), float(value)),)

    def EmptyImage(self, width, height, batch_size, color):
        rgb = [(color >> shift & 255) / 255 for shift in (16, 8, 0)]
        return (torch.tensor(rgb).expand(batch_size, height, width, 3),)

    def MaskComposite(self, destination, source, x, y, operation):
        assert operation == "add"
        out = destination.clone()
        part = out[:, y : y + source.shape[1], x : x + source.shape[2]]
        part += source[:, : part.shape[1], : part.shape[2]]
        return (out.clamp(0, 1),)

    def ImageCompositeMasked(self, destination, source, x, y, resize_source, mask=None):
        assert resize_source in (True, False) and (x, y) == (0, 0)
        return (torch.where(mask[..., None] > 0.5, source, destination),)

    def ImageScale(self, image, upscale_method, width, height, crop):
        return (
            torch.nn.functional.interpolate(image.movedim(-1, 1), (height, width), mode=upscale_method).movedim(1, -1),
        )

    def ImageFromBatch(self, image, batch_index, length):
        return (image[batch_index : batch_index + length],)

    def LoadImage(self, image, control=None):
        assert image in ("example.png", "")  # the file that every ComfyUI has, or none; here another image
        rgb, _ = picture_book.render(picture_book.scenes(1, 4), 64)
        pixels = torch.from_numpy(rgb).movedim(-1, 1) / 255
        large = torch.nn.functional.interpolate(pixels, (768, 768), mode="bicubic").clamp(0, 1)
        return (large.movedim(1, -1), torch.zeros(1, 64, 64))

    def ComfySwitchNode(self, on_false, on_true, switch):
        return (on_true if switch else on_false,)

    def ImageCompare(self, image_a, image_b):
        return ()

    def PreviewImage(self, images):
        return (images,)

    def SaveImage(self, images, filename_prefix):
        return (images,)

    def PreviewAny(self, source):
        return (source,)


class Run:
    """Runs saved graphs. Equal nodes run once, also across graphs.

    Args:
        classes: node type to class; other types are those of :class:`Core`.
        changes: values by widget name that replace the saved ones (few steps, say).
    """

    def __init__(self, classes: dict[str, Any], changes: dict[str, Any]):
        self.classes, self.changes = classes, changes
        self.schemas = {name: cls.define_schema() for name, cls in classes.items()}
        self.done: dict[str, Any] = {}

    def graph(self, graph: dict[str, Any]) -> dict[int, tuple[Any, ...]]:
        """Outputs of all nodes by id."""
        self.open(graph)
        return {number: self.outputs(number) for number in self.nodes}

    def open(self, graph: dict[str, Any]) -> None:
        """Take a graph whose nodes run when :meth:`outputs` asks for them."""
        graph = flat(graph)
        self.nodes = {n["id"]: n for n in graph["nodes"] if n["type"] not in VIRTUAL}
        self.links = {link[0]: link for link in graph["links"]}
        self.keys: dict[int, str] = {}

    def outputs(self, number: Any) -> tuple[Any, ...]:
        """Outputs of a node and, before it, of those that it needs."""
        node = self.nodes[number]
        if number not in self.keys:
            linked = {}
            for socket in node["inputs"]:
                if socket["link"] is not None:
                    _, source, slot, *_ = self.links[socket["link"]]
                    self.outputs(source)
                    linked[socket["name"]] = (self.keys[source], slot)
            values = self.values(node, linked)
            key = json.dumps([node["type"], values, sorted(linked.items())])
            if key not in self.done:
                self.done[key] = self.execute(node["type"], values, linked)
            self.keys[number] = key
        return self.done[self.keys[number]]

    def values(self, node: dict[str, Any], linked: dict[str, Any]) -> Any:
        """Values of widgets that no link feeds: by name, or of a core node by position."""
        given = node.get("widgets_values") or []
        if node["type"] not in self.schemas:
            return given
        values = widget_values(node, self.schemas[node["type"]])
        return {k: self.changes.get(k, v) for k, v in values.items() if k not in linked}

    def execute(self, kind: str, values: Any, linked: dict[str, tuple[str, int]]) -> tuple[Any, ...]:
        inputs = {name: self.done[key][slot] for name, (key, slot) in linked.items()}
        if kind not in self.classes:
            run = getattr(Core(), kind)
            widgets = [name for name in inspect.signature(run).parameters if name not in inputs]
            return run(**inputs, **dict(zip(widgets, values, strict=False)))
        inputs |= values
        if self.schemas[kind].is_input_list:
            inputs = {name: [value] for name, value in inputs.items()}
        return self.classes[kind].execute(**inputs).result
