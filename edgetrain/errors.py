"""The package's exceptions; catch `EdgeTrainError` to catch them all.

EdgeTrainError
  InputError              what the user gave cannot be used
    ConfigError           the run file or an option
    DataError             a data file or its arrays
    GraphError            the ONNX model
      UnsupportedOpError  no differentiation rule for an operator
    PlanError             no placement satisfies the limits
  RunError                the run started and failed
    DivergedError         the loss is no longer finite
    FleetError            the devices that are needed are not there
    DeviceError           one device failed or refused; carries .device
      OverfullDeviceError its stage needs more memory than it lends
  BundleError             a bundle is damaged or not what was announced
  OverfullError           a stage needs more memory than this device lends
  EngineError             an inference engine cannot load or run a graph
  TransportError          the broker cannot be reached or refuses us
  WireError               bytes from the network are not a valid frame or message
    ChecksumError         damaged in transit
    FrameTooLargeError    over the announced limit
    FlowError             a peer sends more than it may, or acknowledges what was not sent
    SignatureError        a command is not signed by the coordinator, or is a recording
"""

from __future__ import annotations


class EdgeTrainError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(EdgeTrainError):
    pass


class ConfigError(InputError):
    pass


class DataError(InputError):
    pass


class GraphError(InputError):
    pass


class UnsupportedOpError(GraphError):
    """No differentiation rule exists for an operator.

    Attributes:
        op_type: ONNX operator name, such as ``"NonMaxSuppression"``.
        node: name of the first node that needs it.
    """

    def __init__(self, op_type: str, node: str, advice: str = "") -> None:
        text = f"no differentiation rule for ONNX op {op_type!r} (node {node!r})"
        super().__init__(f"{text}; {advice}" if advice else text)
        self.op_type = op_type
        self.node = node


class PlanError(InputError):
    pass


class RunError(EdgeTrainError):
    pass


class DivergedError(RunError):
    """The loss is no longer finite.

    Attributes:
        step: the step whose loss was not finite, from 0.
    """

    def __init__(self, step: int) -> None:
        super().__init__(
            f"the loss of step {step + 1} is not finite; the weights of the last good step"
            " are kept. A lower learning rate or [train] clip_norm usually mends this"
        )
        self.step = step


class FleetError(RunError):
    pass


class DeviceError(RunError):
    """One device failed or refused.

    Attributes:
        device: its name.
    """

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"device {device!r}: {reason}")
        self.device = device


class BundleError(EdgeTrainError):
    pass


class OverfullDeviceError(DeviceError):
    """A stage needs more memory than its device lends, as the device says.

    Attributes:
        device: its name.
        stage: its number.
        needed_bytes: by the stage's own graphs.
    """

    def __init__(self, device: str, reason: str, stage: int, needed_bytes: int) -> None:
        super().__init__(device, reason)
        self.stage = stage
        self.needed_bytes = needed_bytes


class OverfullError(EdgeTrainError):
    """A stage needs more memory than this device lends.

    Attributes:
        needed_bytes: by the stage's own graphs.
    """

    def __init__(self, reason: str, needed_bytes: int) -> None:
        super().__init__(reason)
        self.needed_bytes = needed_bytes


class EngineError(EdgeTrainError):
    pass


class TransportError(EdgeTrainError):
    pass


class WireError(EdgeTrainError):
    pass


class ChecksumError(WireError):
    pass


class FrameTooLargeError(WireError):
    pass


class FlowError(WireError):
    pass


class SignatureError(WireError):
    pass
