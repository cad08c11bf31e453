"""Parser of protocols and plans on the command line."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import rshift

from paceline.catalogue.modifiers import ADDITIONS
from paceline.catalogue.protocols import CATALOGUE
from paceline.catalogue.switch_timing import SwitchTiming
from paceline.core.duration import Duration
from paceline.errors import UsageError
from paceline.protocols.protocol import Phase, Plan, as_plan
from paceline.utils.argument_types import checked_types
from paceline.utils.spec_parser import bind, parse_call, split_top


@checked_types(fraction=", a share of the workload between 0 and 1, as 0.0625")
def sync_switch(
    fraction: float | None = None, timing: str | None = None, first: str | None = None, then: str | None = None
) -> Plan:
    """Sync-Switch: one protocol (bsp) for a fraction of the workload, then another (asp); or the file of a search.

    Args:
        fraction: fraction of the workload under the first protocol, in (0, 1); give this or timing.
        timing: path of the file timing.toml of a search.
        first: text of the first protocol, bsp if not given.
        then: text of the second protocol, asp if not given.

    Paper: Li et al., "Sync-Switch: hybrid parameter synchronization for distributed deep learning", 2021.
    """
    if (fraction is None) == (timing is None):
        raise UsageError(
            "sync_switch needs either a fraction or the timing file of a search; type sync_switch(fraction=0.0625) or "
            "sync_switch(timing=FILE)"
        )
    if timing is not None:
        found = SwitchTiming.read(timing)
        for knob, given, searched in (("first", first, found.first), ("then", then, found.then)):
            if given is not None and _typed_phase(given, knob).protocol != _typed_phase(searched, knob).protocol:
                raise UsageError(
                    f"{timing} was found for {knob} = {searched!r}, and {given!r} is another protocol; search again, "
                    f"or add to the one that was searched with, as {knob}='{searched} + stragglers'"
                )
        plan = switch_plan(found.fraction, first or found.first, then or found.then)
        return replace(plan, found_for=found.found_for)
    assert fraction is not None
    if not 0 < fraction < 1:
        raise UsageError(f"sync_switch: fraction = {fraction!r}, expected a share between 0 and 1{_instead(fraction)}")
    return switch_plan(fraction, first or "bsp", then or "asp")


def switch_plan(fraction: float, first: str, then: str) -> Plan:
    """Return the plan of one protocol for a fraction of the workload and another for the rest.

    Args:
        fraction: fraction of the workload, in (0, 1]; with 1, the first protocol is the whole plan.
        first: text of the first protocol with its modifiers and without an end, as "k_async(k=2) + staleness_lr".
        then: text of the second protocol.
    """
    begins, goes_on = _typed_phase(first, "first"), _typed_phase(then, "then")
    return as_plan(begins) if fraction == 1 else begins.until(fraction) >> goes_on


def _typed_phase(text: str, knob: str) -> Phase:
    plan = parse_plan(text)
    if len(plan.phases) > 1 or plan.phases[0].end is not None:
        raise UsageError(f"{knob} = {text!r}, expected the text of one protocol without an end, as 'ssp(lead=2)'")
    return plan.phases[0]


def _instead(fraction: float) -> str:
    if not 0 <= fraction <= 100:
        return ", as 0.0625"
    if fraction in (0, 1):
        return f"; there would be no switch, so type {'the second' if fraction == 0 else 'the first'} protocol alone"
    return f"; if this is percent, type {fraction / 100:g}"


PLANS: Mapping[str, Callable[..., Plan]] = {"sync_switch": sync_switch}


def parse_plan(text: str) -> Plan:
    """Read a plan such as ``k_sync(k=12)``, ``bsp@25% >> asp`` or ``asp + staleness_lr(C=0.01)``.

    After ``+`` stands what is done about stale gradients, stragglers or the momentum, after ``@`` the point of the run
    at which a part ends: ``25%`` of the workload, ``updates=100``, ``gradients=6400``, ``epochs=2`` or ``seconds=60``.

    >>> print(parse_plan("bsp@25% >> k_sync(k=3)@epochs=2 >> asp"))
    bsp until 0.25 of the workload >> k_sync(k=3) until 2 epochs >> asp
    >>> print(parse_plan("sync_switch(fraction=0.25, then='ssp(lead=2)')"))
    bsp until 0.25 of the workload >> ssp(lead=2)
    """
    *firsts, last = [_parse_part(part) for part in split_top(text, ">>")]
    for part in firsts:
        if len(part.phases) > 1:
            raise UsageError(f"{part} runs to the end of the run, so {last} is never reached; type it last, or alone")
    return reduce(rshift, [*firsts, last])


def _parse_part(text: str) -> Plan:
    call, *ends = split_top(text, "@")
    if len(ends) > 1:
        raise UsageError(f"{text!r} has two ends; expected one, as in bsp@25%")
    protocol, *additions = split_top(call, "+")
    given = bind(parse_call(protocol), {**CATALOGUE, **PLANS})
    if isinstance(given, Plan):
        _refuse_more(protocol.strip(), additions, ends)
        return given
    phase = given if isinstance(given, Phase) else Phase(given)
    phase += tuple(bind(parse_call(each, "staleness_lr(C=0.01)"), ADDITIONS) for each in additions)
    return as_plan(replace(phase, end=_parse_end(call.strip(), ends[0])) if ends else phase)


def _parse_end(call: str, text: str) -> Duration:
    try:
        return Duration.parse(text)
    except UsageError:
        end, plus, addition = (each.strip() for each in text.partition("+"))
        if not plus:
            raise
        raise UsageError(f"{text.strip()!r}: the end comes last; type {call} + {addition}@{end}") from None


def _refuse_more(name: str, additions: Sequence[str], ends: Sequence[str]) -> None:
    """Refuse what is typed after a name that stands for several parts, of which none is meant."""
    if additions:
        addition = additions[0].strip()
        raise UsageError(
            f"{name} has two parts, and {addition} may be for either; type it in first= or then=, as "
            f"sync_switch(fraction=0.25, then='asp + {addition}')"
        )
    if ends:
        raise UsageError(f"{name} runs to the end of the run; leave @{ends[0].strip()} out")
