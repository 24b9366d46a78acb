"""A search from its request to its files: the best job, its plan, and the report as a web page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from autosac.configurations.found.best_files import plan_beside, write_best
from autosac.configurations.found.python_files import check_python_file
from autosac.configurations.found.results import SearchResult
from autosac.configurations.running.sessions import searching
from autosac.configurations.space.request import SearchRequest
from autosac.files.writing import check_outputs, is_special
from autosac.report.search_pictures import check_drawing, search_html
from autosac.titan.version import has_python_jobs

_Told = Callable[[SearchResult, Sequence[Path]], None]


def completed_search(
    request: SearchRequest,
    progress: Callable[[str], None] = lambda _: None,
    interrupted: _Told = lambda _, __: None,
    inputs: Sequence[Path] = (),
) -> tuple[SearchResult, list[Path]]:
    """Search to the end and write what the request asks for; the result, and the files that were written.

    Ctrl-C ends it, too: the files are those of the best so far then, and `interrupted` is called with it; also where a file
    cannot be written after all. `inputs`: files that must not be overwritten, beside those that the request names.
    """
    output, page = _path(request.output), _path(request.html)
    if output is not None and has_python_jobs():
        check_python_file(output)
    inputs = (Path(request.job), *inputs, *(Path(offer.gpu) for offer in request.offers))
    inputs += tuple(Path(offer.cluster) for offer in request.offers if offer.cluster is not None)
    check_outputs((("-o", output),), inputs)
    plan = plan_beside(output) if output is not None and not is_special(output) else None
    check_outputs((("-o", output), ("the plan beside -o", plan), ("--html", page)), inputs)
    if page is not None:
        check_drawing()

    def written(result: SearchResult) -> list[Path]:
        files = write_best(output, request, result) if output is not None else []
        if page is not None and result.rows:
            search_html(page, result)
            files.append(page)
        return files

    def told(result: SearchResult) -> list[Path]:
        try:
            return written(result)
        except OSError:  # a full disk: what was found is not lost with the files
            interrupted(result, ())
            raise

    with searching(request, progress) as search:
        try:
            result = search.run()
        except KeyboardInterrupt:
            result = search.result()
            interrupted(result, told(result))
            raise
    return result, told(result)


def _path(given: object) -> Path | None:
    return Path(str(given)) if given is not None else None
