"""Linear regression in context: the task, its risks, its gradient flows, its training by SGD."""

from measureattn.regression.flow import Flow, gradient_flow
from measureattn.regression.risk import EigenRisk, LinearRisk, PromptRisk
from measureattn.regression.softmax import QueryRisk
from measureattn.regression.task import Task
from measureattn.regression.training import Training

__all__ = [
    "EigenRisk",
    "Flow",
    "LinearRisk",
    "PromptRisk",
    "QueryRisk",
    "Task",
    "Training",
    "gradient_flow",
]
