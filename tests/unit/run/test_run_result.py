from burnish.run.result import worked_seconds
from burnish.telemetry.events import Event, EventKind


def event(t, kind):
    return Event(t=t, kind=kind, step=0)


def test_wall_time_adds_up_sessions_and_leaves_out_the_pauses():
    events = [
        event(10.0, EventKind.RUN_STARTED),
        event(14.0, EventKind.STEP_FINISHED),
        event(100.0, EventKind.RUN_RESUMED),
        event(101.5, EventKind.RUN_FINISHED),
    ]
    assert worked_seconds(events) == 5.5
    assert worked_seconds([]) == 0.0
