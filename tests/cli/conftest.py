"""What the tests of all commands use."""

import pytest

from xla_amp import cli


@pytest.fixture
def call_cli(capsys):
    """One call of the program in this process: exit status, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            status = cli.main(list(arguments))
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call
