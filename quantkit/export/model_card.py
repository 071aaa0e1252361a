"""README.md of an export: what it is, what it cost, and how to load it.

Written from the checkpoint's own report and, where it is given, from what `quantkit eval` measured.
Nothing is claimed that one of the two does not say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.export.origin import Origin
from quantkit.export.target import COMPRESSED_TENSORS
from quantkit.inspection import Inspection
from quantkit.inspection.overview import overview
from quantkit.scheme import Granularity, QuantSpec, Scheme

ENGINES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "transformers": "transformers",
    "tensorrt-llm": "TensorRT-LLM",
}
"""How engines write their own names."""
KV_FLAGS = {"vllm": " --kv-cache-dtype fp8", "sglang": " --kv-cache-dtype fp8_e4m3"}
WORDS = {
    Granularity.TENSOR: "one scale per tensor",
    Granularity.CHANNEL: "one scale per output channel",
    Granularity.TOKEN: "one scale per token",
    Granularity.HEAD: "one scale per KV head",
}


@dataclass(frozen=True, slots=True)
class Card:
    """All that a card says.

    `name` is what the export is called in commands: a repository, or a folder. `engines` are those
    for which `quantkit check` found no error; `quality` is what `quantkit eval --json` printed.
    """

    name: str
    format_name: str
    scheme: Scheme
    origin: Origin
    inspection: Inspection
    engines: Sequence[str]
    codes: str
    quality: Mapping[str, Any] | None

    def text(self) -> str:
        """Return the file."""
        sections = (self._title(), self._facts(), self._quality(), self._use())
        return f"---\n{self._metadata()}\n---\n\n" + "\n\n".join(sections) + "\n"

    def _metadata(self) -> str:
        from huggingface_hub import ModelCardData

        base = self.origin.base_model
        fields: dict[str, Any] = {
            **self.origin.licence,
            "base_model": base,
            "base_model_relation": "quantized" if base else None,
            "language": self.origin.languages or None,
            "library_name": "transformers" if "transformers" in self.engines else None,
            "pipeline_tag": "text-generation",
            "tags": list(dict.fromkeys([*self.origin.tags, "fp8", "quantkit", self.format_name])),
        }
        return str(ModelCardData(**fields).to_yaml())

    def _title(self) -> str:
        source = self.origin.base_model or self.origin.name
        return (
            f"# {self.name.rpartition('/')[2]}\n\n{source}, quantized to FP8 by quantkit: weights "
            f"in E4M3 with {_words(self.scheme.weights)}; {_inputs(self.scheme)}; "
            f"{_cache(self.scheme)}."
        )

    def _facts(self) -> str:
        rows = [(label, text) for label, text in overview(self.inspection) if text != "-"]
        rows.append(("format", f"{self.format_name}; {self.codes}"))
        return "## How it was made\n\n" + _table(("", ""), rows)

    def _quality(self) -> str:
        if self.quality is None:
            return (
                "## Quality\n\nNot measured. This measures perplexity and the divergence from the "
                f"original:\n\n```bash\nquantkit eval {self.name} --reference "
                f"{self.origin.base_model or 'ORIGINAL'}\n```"
            )
        rows = [_quality_row(kv, found) for kv, found in self.quality["measurements"].items()]
        head = ("KV cache", "mean KL", "p99 KL", "same top-1", "perplexity / original")
        return (
            "## Quality\n\nAgainst the original, in nats a token:\n\n"
            f"{_table(head, rows)}\n\n{_setting(self.quality)}"
        )

    def _use(self) -> str:
        parts = [_snippet(ENGINES[engine], self._command(engine)) for engine in self.engines]
        parts.append(_snippet("quantkit", _python(self.name)))
        note = (
            "`quantkit check` found no error for the engines named here; it reads files, and loads "
            "nothing."
        )
        return "## Use\n\n" + "\n\n".join([*parts, note])

    def _command(self, engine: str) -> str:
        flags = KV_FLAGS.get(engine, "") if self.scheme.kv else ""
        if engine == "vllm" and self.format_name == COMPRESSED_TENSORS:
            flags = ""  # the checkpoint says so itself
        return {
            "vllm": f"vllm serve {self.name}{flags}",
            "sglang": f"python -m sglang.launch_server --model-path {self.name}{flags}",
            "tensorrt-llm": f"trtllm-serve {self.name}",
            "transformers": _transformers(self.name, self.format_name),
        }[engine]


def _quality_row(kv: str, found: Mapping[str, float]) -> tuple[str, ...]:
    return (
        "not quantized" if kv == "none" else kv,
        f"{found['mean_kl']:.4g}",
        f"{found['p99_kl']:.3g}",
        f"{found['top1_agreement']:.1%}",
        f"{found['ppl_ratio']:.4f} ± {found['ppl_ratio_standard_error']:.4f}",
    )


def _setting(quality: Mapping[str, Any]) -> str:
    # A card is public, and where files lay is nobody's business.
    sources = [s if s.startswith("hf:") else s.rpartition("/")[2] for s in quality["data"]]
    return (
        f"{quality['count']:,} tokens of {', '.join(sources)}; window "
        f"{quality['window']}, stride {quality['stride']}; computed in {quality['dtype']}, "
        f"activations {quality['activations']}."
    )


def _words(spec: QuantSpec) -> str:
    if spec.block_shape is not None:
        return f"one scale per block of {spec.block_shape[0]} x {spec.block_shape[1]}"
    if spec.group_size is not None:
        return f"one scale per {spec.group_size} features"
    return WORDS[spec.granularity]


def _inputs(scheme: Scheme) -> str:
    if scheme.inputs is None:
        return "inputs are not quantized"
    when = "computed at run time" if scheme.inputs.dynamic else "calibrated"
    return f"inputs in E4M3 with {_words(scheme.inputs)}, {when}"


def _cache(scheme: Scheme) -> str:
    if scheme.kv is None:
        return "no scales for an FP8 KV cache"
    per = "KV head" if scheme.kv.granularity is Granularity.HEAD else "layer"
    return f"calibrated scales for an FP8 KV cache, one per {per}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = list(head)
    lines = [cells, ["---"] * len(cells), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _snippet(title: str, code: str) -> str:
    language = "python" if "import" in code else "bash"
    return f"{title}:\n\n```{language}\n{code}\n```"


def _transformers(name: str, format_name: str) -> str:
    needs = "  # pip install compressed-tensors" if format_name == COMPRESSED_TENSORS else ""
    return (
        f"from transformers import AutoModelForCausalLM, AutoTokenizer{needs}\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}", device_map="auto")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    )


def _python(name: str) -> str:
    return f'from quantkit import load_fp8\n\nmodel = load_fp8("{name}")  # a local folder'
