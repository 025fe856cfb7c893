"""A service domain: a clinic with appointments. The agent has four tools and serves patients.

.venv/bin/python -m src.train $(grep -v '^#' examples/healthcare.args) model_name=Qwen/Qwen3-4B
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from src.envs.service.domains import DomainContext, ServiceDomain, tool_domain
from src.envs.service.toy_retail import Database, Tool, record

POLICY = """You are the service agent of a clinic.
Read an appointment before you change it. Never cancel an appointment of another patient.
When the patient asks when an appointment is, say the day."""
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
PATIENTS = ("Ana", "Ben", "Chi", "Dov", "Eva", "Fay")
NUM_HELD_OUT = 2  # patients whose tasks are held out


def get_appointment(database: Database, *, appointment: str) -> Mapping[str, object]:
    return record(database, "appointments", appointment)


def cancel_appointment(database: Database, *, appointment: str) -> Mapping[str, object]:
    record(database, "appointments", appointment)["status"] = "cancelled"
    return {"status": "cancelled"}


def move_appointment(database: Database, *, appointment: str, day: str) -> Mapping[str, object]:
    record(database, "appointments", appointment)["day"] = day
    return {"day": day}


def transfer_to_nurse(database: Database, *, summary: str) -> Mapping[str, object]:
    return {"transferred": True}


TOOLS = (
    Tool(
        name="get_appointment",
        description="Return the patient, day and status of an appointment.",
        parameters=["appointment"],
        run=get_appointment,
    ),
    Tool(
        name="cancel_appointment",
        description="Cancel an appointment.",
        parameters=["appointment"],
        run=cancel_appointment,
        writes=True,
    ),
    Tool(
        name="move_appointment",
        description="Move an appointment to another day.",
        parameters=["appointment", "day"],
        run=move_appointment,
        writes=True,
    ),
    Tool(
        name="transfer_to_nurse",
        description="Hand a medical question over to a nurse.",
        parameters=["summary"],
        run=transfer_to_nurse,
    ),
)


def database() -> Database:
    """Return one booked appointment per patient. The days repeat after Friday."""
    appointments: dict[str, dict[str, Any]] = {
        f"A{number}": {"patient": patient, "day": DAYS[number % len(DAYS)], "status": "booked"}
        for number, patient in enumerate(PATIENTS)
    }
    return {"appointments": appointments}


def rows() -> list[dict[str, Any]]:
    """Return three tasks per patient. A task contains the instruction and the messages of the user, the gold
    actions, and the facts that the agent must communicate."""
    tasks = []
    for number, (appointment_id, appointment) in enumerate(database()["appointments"].items()):
        patient, day = appointment["patient"], DAYS[(number + 2) % len(DAYS)]
        wishes = {
            "cancel": (
                f"cancel appointment {appointment_id}",
                {"name": "cancel_appointment", "arguments": {"appointment": appointment_id}},
                [],
            ),
            "move": (
                f"move appointment {appointment_id} to {day}",
                {"name": "move_appointment", "arguments": {"appointment": appointment_id, "day": day}},
                [],
            ),
            "ask": (f"tell me the day of appointment {appointment_id}", None, [appointment["day"]]),
        }
        for wish, (text, action, facts) in wishes.items():
            tasks.append(
                {
                    "id": f"{wish}-{number}",
                    "split": "train" if number < len(PATIENTS) - NUM_HELD_OUT else "test",
                    "instruction": f"You are {patient}. You want the agent to {text}.",
                    "scripts": [[f"Hello, I am {patient}. Please {text}."]],
                    "actions": [] if action is None else [action],
                    "communicate": facts,
                }
            )
    return tasks


def open_healthcare(context: DomainContext) -> ServiceDomain:
    """Return the domain. `environment_kwargs=domain=examples.healthcare:open_healthcare` selects it."""
    return tool_domain(
        name="healthcare",
        database=database(),
        policy=POLICY,
        tools=TOOLS,
        rows=rows(),
        path=Path(__file__),
        context=context,
    )
