"""``browndwarf bench``: measure a server under load, and compare base with MTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from browndwarf.cli.options import JsonOption, LlamaDirOption

SEPARATOR = "\x00--"


class _TwoLists(TyperCommand):
    """Keeps a ``--`` between two lists of arguments, which click would drop."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [SEPARATOR if word == "--" else word for word in args])


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(
        help="Serving benchmark: exact metrics under load, base against MTP.",
        no_args_is_help=True,
    )
    group.command("run")(run)
    group.command("compare", cls=_TwoLists)(compare)
    group.command("ab")(ab)
    app.add_typer(group, name="bench")


ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", help="Model name in requests. Default: the server's.")
]
DatasetOption = Annotated[
    str,
    typer.Option(
        help="ShareGPT .json, .jsonl of OpenAI messages, .txt, `packaged`, or synthetic:512."
    ),
]
ConcurrencyOption = Annotated[str, typer.Option(help="Requests under way, e.g. 1,2,4,8.")]
NumPromptsOption = Annotated[int, typer.Option(min=1, help="Requests per point.")]
MaxSecondsOption = Annotated[
    str | None, typer.Option(help="Time cap of each point; requests under way are cut.")
]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="Longest answer.")]
WarmupOption = Annotated[int, typer.Option(min=0, help="Requests before each point.")]
IgnoreEosOption = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Answers of full length; another arm than natural ends."),
]
SeedOption = Annotated[int, typer.Option(help="Of requests, arrivals and draws.")]
ApiOption = Annotated[str, typer.Option(help="chat or completions.")]
ShuffleOption = Annotated[
    bool, typer.Option("--shuffle", help="Draw prompts from the whole file, not the first ones.")
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Stop at a damaged dataset.")]
MinCharsOption = Annotated[int, typer.Option(help="Shortest prompt, in characters.")]
MaxCharsOption = Annotated[int, typer.Option(help="Longest prompt, in characters.")]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
LoadTimeoutOption = Annotated[str, typer.Option(help="How long a server may take to load.")]
TimeoutOption = Annotated[str, typer.Option(help="Longest silence of a request.")]
PrefixCacheOption = Annotated[
    bool, typer.Option("--prefix-cache", help="Let the server reuse prompts it has seen.")
]


def run(
    base_url: Annotated[
        str | None, typer.Option(help="Address of a running server, e.g. http://127.0.0.1:8080.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help='Start this server, and stop it: "llama-server -m ...".')
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Start the winning command of this sweep run.")
    ] = None,
    model: ModelOption = None,
    dataset: DatasetOption = "packaged",
    concurrency: ConcurrencyOption = "1",
    num_prompts: NumPromptsOption = 100,
    max_seconds: MaxSecondsOption = None,
    max_tokens: MaxTokensOption = 256,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second: an open loop instead of slots.")
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(help="Shape of gamma arrivals: 1 Poisson, less is burstier, inf constant."),
    ] = 1.0,
    ramp: Annotated[str, typer.Option(help="Time over which the load grows, e.g. 10s.")] = "0",
    warmup: WarmupOption = 1,
    ignore_eos: IgnoreEosOption = False,
    seed: SeedOption = 1,
    temperature: TemperatureOption = 0.0,
    slo: Annotated[
        str | None, typer.Option(help="Limits for goodput, e.g. ttft=2s,tpot=80ms,e2e=30s.")
    ] = None,
    api: ApiOption = "chat",
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the API key.")
    ] = "BROWNDWARF_API_KEY",
    prefix_cache: PrefixCacheOption = False,
    shuffle: ShuffleOption = False,
    strict: StrictOption = False,
    min_chars: MinCharsOption = 4,
    max_chars: MaxCharsOption = 4096,
    max_error_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Above this share of errors the exit code is 1.")
    ] = 0.05,
    timeout: TimeoutOption = "600s",
    load_timeout: LoadTimeoutOption = "15m",
    label: Annotated[str | None, typer.Option(help="Name of the run. Default: the model.")] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Run directory. Default: runs/bench-DATE.")
    ] = None,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Measure this client against a built-in mock.")
    ] = False,
    llama_dir: LlamaDirOption = None,
    json: JsonOption = False,
) -> None:
    """Measure a server at each concurrency (or at a rate): latency, throughput, acceptance."""
    from browndwarf.cli import bench_view, benching
    from browndwarf.cli.render import Output

    out = Output(json=json)
    if selftest:
        report = benching.run_selftest(out)
        out.text(bench_view.selftest_text(report))
        out.document("bench-selftest", 1, {"client": report})
        return
    wanted = benching.settings(
        model=model,
        dataset=dataset,
        concurrency=concurrency,
        num_prompts=num_prompts,
        max_seconds=max_seconds,
        max_tokens=max_tokens,
        rate=rate,
        burstiness=burstiness,
        ramp=ramp,
        warmup=warmup,
        ignore_eos=ignore_eos,
        seed=seed,
        temperature=temperature,
        slo=slo,
        api=api,
        api_key_env=api_key_env,
        prefix_cache=prefix_cache,
        shuffle=shuffle,
        strict=strict,
        min_chars=min_chars,
        max_chars=max_chars,
        timeout=timeout,
        load_timeout=load_timeout,
        label=label,
        llama_dir=llama_dir,
    )
    source = benching.source(base_url, server, recipe)
    folder = out_dir or benching.new_directory("bench")
    record = benching.bench(wanted, source, folder, out)
    bench_view.show_run(record, folder, out)
    code = benching.exit_code(record, max_error_rate, out)
    if code:
        raise typer.Exit(code)


def compare(
    runs: Annotated[
        list[str], typer.Argument(help="BASE... -- MTP...: run directories, in order of repeats.")
    ],
    json: JsonOption = False,
) -> None:
    """Base against MTP: ratio, interval and verdict per concurrency, and the crossover."""
    from browndwarf.cli import bench_pairs, bench_view
    from browndwarf.cli.render import Output

    out = Output(json=json)
    base, mtp = bench_pairs.split_runs(runs, SEPARATOR)
    bench_view.show_comparison(bench_pairs.compare(base, mtp), out)


def ab(
    base: Annotated[str, typer.Option(help="Command of the server without MTP.")],
    mtp: Annotated[str, typer.Option(help="Command of the server with MTP.")],
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; under 3 proves little.")] = 3,
    model: ModelOption = None,
    dataset: DatasetOption = "packaged",
    concurrency: ConcurrencyOption = "1,2,4,8",
    num_prompts: NumPromptsOption = 100,
    max_seconds: MaxSecondsOption = None,
    max_tokens: MaxTokensOption = 256,
    warmup: WarmupOption = 1,
    ignore_eos: IgnoreEosOption = False,
    seed: SeedOption = 1,
    temperature: TemperatureOption = 0.0,
    api: ApiOption = "chat",
    shuffle: ShuffleOption = False,
    strict: StrictOption = False,
    min_chars: MinCharsOption = 4,
    max_chars: MaxCharsOption = 4096,
    timeout: TimeoutOption = "600s",
    load_timeout: LoadTimeoutOption = "15m",
    label: Annotated[str | None, typer.Option(help="Name of the pair. Default: the model.")] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Directory for all runs. Default: runs/ab-DATE.")
    ] = None,
    llama_dir: LlamaDirOption = None,
    json: JsonOption = False,
) -> None:
    """Start both servers in turn (A B B A ...), measure them alike, and compare."""
    from browndwarf.cli import bench_pairs, bench_view, benching
    from browndwarf.cli.render import Output

    out = Output(json=json)
    wanted = benching.settings(
        model=model,
        dataset=dataset,
        concurrency=concurrency,
        num_prompts=num_prompts,
        max_seconds=max_seconds,
        max_tokens=max_tokens,
        warmup=warmup,
        ignore_eos=ignore_eos,
        seed=seed,
        temperature=temperature,
        api=api,
        shuffle=shuffle,
        strict=strict,
        min_chars=min_chars,
        max_chars=max_chars,
        timeout=timeout,
        load_timeout=load_timeout,
        label=label,
        llama_dir=llama_dir,
    )
    folder = out_dir or benching.new_directory("ab")
    bench_view.show_comparison(bench_pairs.alternate(base, mtp, repeats, wanted, folder, out), out)
