"""`quantkit eval`: what a checkpoint lost against its original, as a table, JSON or a gate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli.console import quiet_transformers
from quantkit.cli.eval_output import show


def evaluate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT",
            help="A quantized checkpoint. With --endpoint: where its tokenizer is, also a Hub id.",
        ),
    ],
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The original, to compare with: a Hugging Face folder, Hub id or .gguf file.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA",
            help="builtin, FILE.txt, FILE.jsonl or hf:NAME[:CONFIG][:SPLIT]; may be repeated. "
            "[default: builtin; none with --tasks]",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(help="Tokens a model sees at once. [default: 2048, or the model's limit]"),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens from one window to the next. [default: the window]"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Use only this much text. [default: all]")
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            help="Tasks of the lm-evaluation-harness, such as mmlu_pro, or of --include-path.",
        ),
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Task files of your own; their data may lie beside them."),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples before each question. [default: the task's]")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Ask only this many questions of each task. [default: all]")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Ask in the model's chat format.")
    ] = False,
    batch_size: Annotated[
        int, typer.Option(help="Questions that run together, or requests at a time.")
    ] = 8,
    seed: Annotated[
        int | None,
        typer.Option(help="Of few-shot examples and sampling. [default: the harness's]"),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Put the tasks to an OpenAI-compatible server: http://HOST:PORT/v1, or with "
            "/chat/completions behind it to ask in messages.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Its name on that server. [default: the only one]"),
    ] = None,
    reference_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="A server that has the original.")
    ] = None,
    reference_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The original's name there.")
    ] = None,
    activations: Annotated[
        str,
        typer.Option(
            help="emulate: quantize them as an 8-bit engine does; skip: leave them alone."
        ),
    ] = "emulate",
    kv: Annotated[
        str | None,
        typer.Option(
            help="fp8 or none. [default: both, where the checkpoint has KV scales; tasks run with "
            "what it declares]"
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="What both models compute in: float32, bfloat16 or float16.")
    ] = "float32",
    max_kl: Annotated[
        float | None, typer.Option(help="Exit with 1 if the mean KL is above this.")
    ] = None,
    max_ppl_ratio: Annotated[
        float | None, typer.Option(help="Exit with 1 if the perplexity ratio is above this.")
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            help="Exit with 1 if a score of --tasks is worse than the original's by more than this."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run Python code from the reference's folder."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE.html", help="Also write a self-contained HTML page."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure perplexity, and with --reference how far the checkpoint is from the original.

    With --tasks, put tasks of EleutherAI's lm-evaluation-harness to both instead (or as well, if
    an option of the text is given, too).
    """
    names = [name.strip() for each in tasks or () for name in each.split(",")]
    compared = reference is not None or reference_endpoint is not None
    _check_limits(names, reference is not None, compared, max_kl, max_ppl_ratio, max_drop)
    _check_task_options(
        names,
        {
            "--include-path": include_path,
            "--num-fewshot": num_fewshot,
            "--limit": limit,
            "--apply-chat-template": apply_chat_template or None,
            "--seed": seed,
            "--endpoint": endpoint,
            "--model": model,
            "--reference-endpoint": reference_endpoint,
            "--reference-model": reference_model,
        },
    )
    if output is not None:
        from quantkit.inspection.html_file import check_output

        check_output(output)
    quiet_transformers()
    from quantkit.evaluate import evaluate as run
    from quantkit.evaluate import evaluate_tasks

    common: dict[str, Any] = {
        "activations": activations,
        "kv": kv,
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "trust_remote_code": trust_remote_code,
    }
    asked_of_text = (data, window, stride, max_tokens, max_kl, max_ppl_ratio)
    result = scored = None
    if names:
        scored = evaluate_tasks(
            checkpoint,
            reference,
            tasks=names,
            num_fewshot=num_fewshot,
            limit=limit,
            include_path=include_path,
            apply_chat_template=apply_chat_template,
            batch_size=batch_size,
            seed=seed,
            endpoint=endpoint,
            model=model,
            reference_endpoint=reference_endpoint,
            reference_model=reference_model,
            max_drop=max_drop,
            **common,
        )
    if not names or any(option is not None for option in asked_of_text):
        result = run(
            checkpoint,
            reference,
            data=data or ["builtin"],
            window=window,
            stride=stride,
            max_tokens=max_tokens,
            max_kl=max_kl,
            max_ppl_ratio=max_ppl_ratio,
            **common,
        )
    show(result, scored, as_json, output)


def _check_limits(
    names: list[str],
    has_text_reference: bool,
    compared: bool,
    max_kl: float | None,
    max_ppl_ratio: float | None,
    max_drop: float | None,
) -> None:
    for option, value, fits in (
        ("--max-kl", max_kl, has_text_reference),
        ("--max-ppl-ratio", max_ppl_ratio, has_text_reference),
        ("--max-drop", max_drop, compared),
    ):
        if value is not None and not fits:
            raise typer.BadParameter(
                "compares with the original; give --reference MODEL", param_hint=option
            )
    if max_drop is not None and not names:
        raise typer.BadParameter("is about --tasks; give some", param_hint="--max-drop")


def _check_task_options(names: list[str], options: dict[str, object]) -> None:
    for option, value in options.items():
        if value is not None and not names:
            raise typer.BadParameter("is about --tasks; give some", param_hint=option)
