"""`weft serve`: models behind HTTP."""

import os
from typing import Annotated

import typer

from weft.cli.console import MODEL_HELP, DeviceOption, PrecisionOption, TrustOption, read_name, tell
from weft.errors import ConfigError

TOKEN_VARIABLE = "WEFT_TOKEN"


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            parser=read_name,
            metavar="MODEL",
            help=f"{MODEL_HELP} NAME=MODEL gives it a name. Without any, those that ship with weft.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help=f"The address; another than this machine's needs {TOKEN_VARIABLE}.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free port.")] = 8000,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="A name of this server, such as that of a proxy before it."),
    ] = None,
    origins: Annotated[
        list[str] | None,
        typer.Option("--origin", metavar="https://…", help="A site whose pages may call it from a browser."),
    ] = None,
    queue: Annotated[int, typer.Option("--queue", min=1, help="Requests at a time; others get 429.")] = 256,
    batch_tokens: Annotated[
        int | None,
        typer.Option("--batch-tokens", min=1, help="Tokens that requests share in a batch; by default by the device."),
    ] = None,
    running: Annotated[int, typer.Option("--running", min=1, help="Texts that a model generates at a time.")] = 64,
    time_limit: Annotated[float, typer.Option("--time-limit", min=0.1, help="Seconds for a request.")] = 60.0,
    access_log: Annotated[bool, typer.Option("--access-log", help="Print a line for each request.")] = False,
    trust: TrustOption = False,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "fp32",
) -> None:
    """Serve models over HTTP: predictions, embeddings, attention, streams, and OpenAI's completions."""
    try:
        import fastapi  # noqa: F401
        import httptools  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serve: needs {error.name}, which is not installed; pip install 'weft[serve]'") from None
    from weft.serve.config import ServerConfig
    from weft.serve.models import load_models
    from weft.serve.run import serve as run
    from weft.zoo import bundled_models

    config = ServerConfig(
        host=host,
        port=port,
        token=os.environ.get(TOKEN_VARIABLE) or None,
        allowed_hosts=tuple(name.lower() for name in allowed_hosts or ()),
        origins=tuple(origins or ()),
        queue=queue,
        running=running,
        batch_tokens=batch_tokens,
        time_limit=time_limit,
        access_log=access_log,
    )
    served = load_models(models or bundled_models(), device, trust, precision)
    run(served, config, tell)
