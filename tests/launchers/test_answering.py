"""How the commands beside the experiments end."""

import pytest

from metadist.errors import UserError
from metadist.launchers.answering import answer


def test_what_the_user_can_mend_is_one_sentence(capsys):
    def work() -> None:
        raise UserError("the folder is empty: give another one.")

    assert answer(work) == 2
    said = capsys.readouterr()
    assert said.err == "error: the folder is empty: give another one.\n"
    assert said.out == ""


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (130, 130)])
def test_the_status_is_the_works(returned, status):
    assert answer(lambda: returned) == status


def test_any_other_error_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        answer(lambda: 1 // 0)
