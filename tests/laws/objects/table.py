"""Objects under the laws: what comes back."""

from collections.abc import Callable
from typing import Any

from laws.objects.attributes import (
    ComesToShare,
    ComesToShareObjects,
    Counted,
    Dropping,
    Hooked,
    HookedByObject,
    Metering,
    Private,
    Rearranged,
    SharedDeque,
    SharedDict,
    Tagged,
    Tuned,
)
from laws.objects.data_sets import (
    Rechooses,
    RechoosesForWorkers,
    Relabels,
    RelabelsForWorkers,
    RelabelsNamed,
    RelabelsTensors,
    Restacks,
)
from laws.objects.derived import Derived, Leaf, Plain
from laws.objects.epochs import AsksForLast, LogsAtEnd, LogsWithoutValidation
from laws.objects.files import DrawsInHelper
from laws.objects.functions import Chooses, ChoosesLambdas, Counts, Partials, Weak
from laws.objects.generators import Generators, Iterators, LateGenerators, OfClass, OfFunctions, Taught, Teacher
from laws.objects.hooks import HookedForAStep, TensorHooked
from laws.objects.keys import Gathering, Keyed, Pools
from laws.objects.library import Iterated, Numbers, OfPython, Queued, TellsWorkers
from laws.objects.loaders import (
    Forked,
    ForkedOnce,
    Grades,
    Ordered,
    Recollated,
    Remembers,
    TellsChain,
    TellsShards,
    TellsStream,
    TellsStreamOfWorker,
)
from laws.objects.metrics import (
    ActsLate,
    MeasuresAnew,
    MeasuresByOptimizer,
    MeasuresInDict,
    MeasuresLate,
    MeasuresMidway,
    Tracks,
)
from laws.objects.optimizers import (
    BeginsToAverage,
    Cyclic,
    Cyclic2,
    CyclicCounted,
    CyclicRange,
    Defaulting,
    Lambda,
    NamedParameters,
    Narrow,
    Optimized,
    Replaced,
    SkipsGradients,
    TakesAnother,
    TakesAway,
    TogglesForTwoSteps,
    Warming,
    Wrapping,
)
from laws.objects.read_data import (
    ClosesAnew,
    ClosesAnewOverStream,
    ClosesOverOne,
    Grows,
    HandsOn,
    ReadsArray,
    ReadsChain,
    ReadsDict,
    ReadsList,
    ReadsShared,
    ReadsTorchData,
    ReadsTorchDataInWorkers,
    ReadsTorchDataInWorkersThatStay,
    Reclassifies,
)
from laws.objects.samplers import Samples, TellsItsSampler, Weighed
from laws.objects.slots import SlottedCallback, SlottedData, TellsSlots
from laws.objects.small import Small
from laws.objects.structure import (
    Averaged,
    Discarding,
    Expanded,
    Growing,
    Joined,
    LateUnderValidation,
    Learning,
    Listed,
    Moved,
    Reclassed,
    Rising,
    Shedding,
    Traced,
    Untied,
)
from laws.objects.surroundings import (
    Counting,
    Curriculum,
    Forgetful,
    OfTensors,
    OpenRow,
    Reordered,
    Telling,
    TellingWrapped,
    Watching,
    Wrapped,
    WritesTensors,
)
from laws.objects.unsaved import Metered
from laws.objects.values import (
    Addresses,
    Arrays,
    Callable_,
    Constants,
    Containers,
    Graphed,
    Late,
    Objects,
    OfTorch,
    OnTensors,
    OnTrainer,
    ScaledByHand,
    Tensors,
    Viewed,
    ViewedLate,
)
from laws.objects.views import SplitLate

from midstride.engine import Callback

#: name -> what makes the module, the data or None, and the callbacks
Made = tuple[Callable[[], Small], Callable[[], Any] | None, Callable[[], list[Callback]]]


_MODULES: list[type[Small]] = [
    *(
        Dropping,
        Tagged,
        Private,
        Metering,
        Rearranged,
        Tuned,
        ComesToShareObjects,
        ComesToShare,
        SharedDeque,
        SharedDict,
        Hooked,
        Counted,
        Viewed,
        ViewedLate,
        SplitLate,
        Tensors,
    ),
    *(
        Graphed,
        Arrays,
        Callable_,
        Objects,
        Late,
        Containers,
        Constants,
        Iterators,
        Generators,
        OfClass,
        Teacher,
        Replaced,
    ),
    *(
        Constants,
        Optimized,
        Lambda,
        Cyclic,
        Cyclic2,
        CyclicCounted,
        NamedParameters,
        CyclicRange,
        Narrow,
        Growing,
        Listed,
        Averaged,
        Metered,
        Samples,
        HookedByObject,
        HookedForAStep,
    ),
    *(
        Addresses,
        OnTensors,
        ScaledByHand,
        Taught,
        Derived,
        Leaf,
        OfFunctions,
        TellsItsSampler,
        Keyed,
        Gathering,
        Pools,
        Moved,
        Plain,
        Weighed,
    ),
    *(LateUnderValidation, OfTorch, OnTrainer, Wrapping, DrawsInHelper, Chooses, TensorHooked, Traced),
    *(
        Iterated,
        Numbers,
        Queued,
        TellsWorkers,
        Warming,
        TakesAnother,
        TogglesForTwoSteps,
        Grades,
        Forked,
        ForkedOnce,
        TellsStream,
        TellsShards,
        TellsChain,
        TellsStreamOfWorker,
        ChoosesLambdas,
        Reclassed,
        Partials,
        Weak,
        Counts,
        OfPython,
        LateGenerators,
    ),
    *(Remembers, Ordered, Recollated),
    *(
        AsksForLast,
        LogsAtEnd,
        LogsWithoutValidation,
        MeasuresAnew,
        MeasuresByOptimizer,
        MeasuresInDict,
        MeasuresLate,
        MeasuresMidway,
        Tracks,
        ActsLate,
        BeginsToAverage,
        Defaulting,
        SkipsGradients,
        TakesAway,
    ),
    *(Shedding, Untied, Joined, Discarding, Learning, Expanded),
    *(Relabels, RelabelsForWorkers, RelabelsNamed, Rechooses, RechoosesForWorkers, Restacks, RelabelsTensors),
    *(
        ReadsTorchData,
        ReadsTorchDataInWorkers,
        ReadsTorchDataInWorkersThatStay,
        ReadsList,
        ReadsDict,
        ReadsArray,
        ReadsChain,
        Reclassifies,
        ClosesAnew,
        ClosesAnewOverStream,
        ClosesOverOne,
        HandsOn,
        Grows,
        ReadsShared,
    ),
]


KEPT: dict[str, Made] = {kind.__name__: (kind, None, list) for kind in _MODULES}


KEPT |= {
    "callback": (Small, None, lambda: [Forgetful()]),
    "a callback whose state has one row twice": (Small, None, lambda: [OpenRow()]),
    "the class of a callback": (Small, None, lambda: [Rising()]),
    "data of the module": (Watching, None, lambda: [Curriculum()]),
    "data": (Telling, Counting, list),
    "an order in data": (Reordered, None, list),
    "data that torch wraps": (TellingWrapped, Wrapped, list),
    "slots": (TellsSlots, SlottedData, lambda: [SlottedCallback()]),
    "slots, read in workers": (TellsSlots, lambda: SlottedData(workers=1), lambda: [SlottedCallback()]),
    "data of torch": (WritesTensors, OfTensors, list),
}
