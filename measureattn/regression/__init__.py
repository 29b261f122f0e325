"""Linear regression in context: the task and its laws, its risks, its gradient flows."""

from measureattn.regression.flow import Flow, gradient_flow
from measureattn.regression.risk import EigenRisk, LinearRisk, PromptRisk
from measureattn.regression.softmax import QueryRisk
from measureattn.regression.task import Task

__all__ = [
    "EigenRisk",
    "Flow",
    "LinearRisk",
    "PromptRisk",
    "QueryRisk",
    "Task",
    "gradient_flow",
]
