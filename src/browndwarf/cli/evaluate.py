"""``browndwarf eval``: quality gates. Perplexity, divergence, losslessness, a quiz."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from browndwarf.cli.options import DockerOption, JsonOption, LlamaDirOption

ModelArgument = Annotated[str, typer.Argument(help="A GGUF, `demo`, or hf:owner/name[:file].")]
TextOption = Annotated[
    Path | None, typer.Option(help="UTF-8 text to evaluate. MODEL demo brings its own.")
]
KvOption = Annotated[
    str, typer.Option(help="KV cache types, e.g. f16,q8_0; K:V where they differ.")
]
CtxOption = Annotated[str, typer.Option(help="Tokens per chunk, e.g. 512,4096,16k.")]
ChunksOption = Annotated[int | None, typer.Option(min=1, help="At most so many chunks.")]
LayersOption = Annotated[str, typer.Option(help="Layers on the device: all, or a number.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="CPU threads.")]
AgainstOption = Annotated[
    Path | None,
    typer.Option(help="An earlier --json document of this command to compare with; worse ends 1."),
]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(
        help="Quality gates: perplexity, divergence, losslessness, quiz.", no_args_is_help=True
    )
    group.command("ppl")(ppl)
    group.command("kld")(kld)
    group.command("lossless")(lossless)
    group.command("quiz")(quiz)
    app.add_typer(group, name="eval")


def ppl(
    model: ModelArgument,
    text: TextOption = None,
    kv: KvOption = "f16",
    ctx: CtxOption = "512",
    chunks: ChunksOption = None,
    layers: LayersOption = "all",
    threads: ThreadsOption = None,
    against: AgainstOption = None,
    llama_dir: LlamaDirOption = None,
    docker: DockerOption = None,
    json: JsonOption = False,
) -> None:
    """Perplexity over a text; several KV types or contexts make a table with the cost of each."""
    from browndwarf.cli import eval_view, evaluating
    from browndwarf.cli.render import Output

    out = Output(json=json)
    records = evaluating.perplexities(
        evaluating.Texts(model, text, kv, ctx, chunks, layers, threads, llama_dir, docker), out
    )
    compared = evaluating.against_ppl(against, records) if against else None
    eval_view.show_ppl(out, records, compared)
    if compared is not None and compared.verdict == "worse":
        raise typer.Exit(1)


def kld(
    model: ModelArgument,
    reference: Annotated[
        str, typer.Option(help="The model to compare with, mostly the same in a higher precision.")
    ],
    text: TextOption = None,
    kv: KvOption = "f16",
    reference_kv: Annotated[str, typer.Option(help="KV cache type of the reference.")] = "f16",
    ctx: CtxOption = "512",
    chunks: ChunksOption = None,
    layers: LayersOption = "all",
    threads: ThreadsOption = None,
    against: AgainstOption = None,
    llama_dir: LlamaDirOption = None,
    docker: DockerOption = None,
    json: JsonOption = False,
) -> None:
    """Divergence of a model's predictions from a reference's; its logits are kept for next time."""
    from browndwarf.cli import eval_view, evaluating
    from browndwarf.cli.render import Output

    out = Output(json=json)
    records = evaluating.divergences(
        evaluating.Texts(model, text, kv, ctx, chunks, layers, threads, llama_dir, docker),
        reference,
        reference_kv,
        out,
    )
    compared = evaluating.against_kld(against, records) if against else None
    eval_view.show_kld(out, records, compared)
    if compared is not None and compared.verdict == "worse":
        raise typer.Exit(1)


def lossless(
    model: ModelArgument,
    draft: Annotated[
        str | None, typer.Option("--draft", "-d", help="The MTP head's GGUF, where it is separate.")
    ] = None,
    n_max: Annotated[str, typer.Option(help="Draft tokens per step, e.g. 1,2,3.")] = "3",
    target_types: Annotated[
        str, typer.Option(help="Target types; missing ones are quantized first.")
    ] = "as-is",
    head_types: Annotated[
        str, typer.Option(help="Head types, e.g. Q8_0,Q6_K; missing ones are quantized first.")
    ] = "as-is",
    prompts: Annotated[
        str, typer.Option(help="Workloads: prose, code, json, chat, or .jsonl and .txt files.")
    ] = "prose,code,json,chat",
    count: Annotated[int, typer.Option(min=1, help="Prompts per workload, at most.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer, at most.")] = 96,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 is greedy; else a test of the distribution.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="First seed.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="Answers per prompt with a temperature.")] = 16,
    kv: Annotated[str, typer.Option(help="KV cache type; K:V where they differ.")] = "f16",
    ctx: Annotated[str, typer.Option(help="Context size.")] = "4096",
    layers: LayersOption = "all",
    threads: ThreadsOption = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="Any other llama-server option: NAME=VALUE. Repeatable."),
    ] = None,
    llama_dir: LlamaDirOption = None,
    docker: DockerOption = None,
    json: JsonOption = False,
) -> None:
    """Decode with and without speculation; end with 1 where they really part."""
    from browndwarf.cli import eval_view, evaluating
    from browndwarf.cli.render import Output

    out = Output(json=json)
    records = evaluating.losslessness(
        evaluating.Decoding(
            model=model,
            draft=draft,
            n_max=n_max,
            target_types=target_types,
            head_types=head_types,
            prompts=prompts,
            count=count,
            tokens=tokens,
            temperature=temperature,
            seed=seed,
            seeds=seeds,
            kv=kv,
            ctx=ctx,
            layers=layers,
            threads=threads,
            option=tuple(option or ()),
            llama_dir=llama_dir,
            docker=docker,
        ),
        out,
    )
    eval_view.show_lossless(out, records)
    if not all(record.ok for record in records):
        raise typer.Exit(1)


def quiz(
    model: Annotated[
        str | None, typer.Argument(help="A GGUF, `demo`, or hf:owner/name[:file].")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Instead of MODEL: any OpenAI-compatible endpoint.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", "-d", help="Serve MODEL with this MTP head.")
    ] = None,
    n_max: Annotated[int, typer.Option(min=1, help="Draft tokens per step, with --draft.")] = 3,
    thinking: Annotated[
        str, typer.Option(help="on, off, both, or default: the endpoint's own.")
    ] = "off",
    questions: Annotated[
        str | None,
        typer.Option(help="general, demo, or a .jsonl or .yaml file. Default: what fits MODEL."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Longest answer. Default: 512, thinking 4096.")
    ] = 0,
    kv: Annotated[str, typer.Option(help="KV cache type; K:V where they differ.")] = "f16",
    ctx: Annotated[str, typer.Option(help="Context size.")] = "8192",
    layers: LayersOption = "all",
    threads: ThreadsOption = None,
    name: Annotated[
        str, typer.Option("--model-name", help="Model name in requests to --base-url.")
    ] = "",
    api_key_env: Annotated[
        str, typer.Option(help="Variable that holds the key for --base-url.")
    ] = "OPENAI_API_KEY",
    against: Annotated[
        Path | None,
        typer.Option(help="An earlier --json document of a quiz to compare with; worse ends 1."),
    ] = None,
    llama_dir: LlamaDirOption = None,
    docker: DockerOption = None,
    json: JsonOption = False,
) -> None:
    """Questions with mechanical graders, through any OpenAI-compatible endpoint."""
    from browndwarf.cli import eval_view, evaluating
    from browndwarf.cli.render import Output

    out = Output(json=json)
    record = evaluating.quizzed(
        evaluating.Quizzing(
            model=model,
            base_url=base_url,
            draft=draft,
            n_max=n_max,
            thinking=thinking,
            questions=questions,
            max_tokens=max_tokens,
            kv=kv,
            ctx=ctx,
            layers=layers,
            threads=threads,
            name=name,
            api_key_env=api_key_env,
            llama_dir=llama_dir,
            docker=docker,
        ),
        out,
    )
    compared = evaluating.against_quiz(against, record) if against else None
    eval_view.show_quiz(out, record, compared)
    if compared is not None and compared.verdict == "worse":
        raise typer.Exit(1)
