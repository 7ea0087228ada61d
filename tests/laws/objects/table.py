"""Objects under the laws: what comes back, and what is named."""

from collections.abc import Callable
from typing import Any

from laws.objects.attributes import (
    Counted,
    Dropping,
    Hooked,
    HookedByObject,
    Private,
    SharedDeque,
    SharedDict,
    Tagged,
    Tuned,
)
from laws.objects.code import (
    InContext,
    InDefault,
    InDescriptor,
    InEnum,
    InOwnDefault,
    InSingleton,
    OnAutogradFunction,
    OnFunction,
)
from laws.objects.derived import Derived, Leaf, Plain
from laws.objects.files import CountsInHelper, CountsOnClassOfHelper, DrawsInHelper, SwapsInHelper
from laws.objects.functions import Appends, Chooses, ChoosesLambdas, ChoosesLate, Linked, Partials, Patched, Weak
from laws.objects.generators import Generators, Iterators, OfClass, OfFunctions, Teacher
from laws.objects.hooks import HookedForAStep, HookedLate, TensorHooked, TensorHookedLate, Unhooked
from laws.objects.imported import CountsWhereImported
from laws.objects.keys import Gathering, Keyed
from laws.objects.library import Iterated, Numbers, Queued, TellsWorkers
from laws.objects.loaders import (
    Forked,
    ForkedOnce,
    Grades,
    LoadsLocked,
    LoadsTailored,
    Loops,
    ReadsItselfInWorkers,
    TellsChain,
    TellsLockedStream,
    TellsShards,
    TellsStream,
    TellsStreamOfWorker,
)
from laws.objects.optimizers import (
    Cyclic,
    Cyclic2,
    CyclicRange,
    Lambda,
    Narrow,
    Optimized,
    Replaced,
    TakesAnother,
    Warming,
    Wrapping,
)
from laws.objects.samplers import (
    Samples,
    SamplesAsked,
    SamplesExpecting,
    SamplesForgetting,
    Streams,
    TellsItsSampler,
    Weighed,
)
from laws.objects.small import Small
from laws.objects.structure import Averaged, Growing, LateUnderValidation, Listed, Moved, Reclassed, Rising, Tied
from laws.objects.surroundings import (
    ActsOtherwise,
    Counting,
    CountsInCollate,
    CountsInWorker,
    CountsOnClass,
    Curriculum,
    Forgetful,
    KeepsDraws,
    LockedCallback,
    OfTensors,
    Opened,
    Opening,
    Pruned,
    Reordered,
    Telling,
    TellingWrapped,
    Watching,
    Wrapped,
    WritesTensors,
)
from laws.objects.unsaved import Clips, CountsInGlobal, Deaf, Loses, Metered, Swaps, Weighs
from laws.objects.values import (
    Addresses,
    Arrays,
    Callable_,
    Constants,
    Containers,
    Graphed,
    Late,
    Locked,
    Objects,
    OfTorch,
    OnTensors,
    OnTrainer,
    ScaledByHand,
    Tensors,
    Viewed,
    ViewedLate,
)

from midstride.engine import Callback

#: name -> what makes it, whether it is refused, and the words
NAMED: dict[str, tuple[Any, bool, str]] = {
    "a parameter that goes": ((Pruned, None, list), True, "the parameter layer.weight was there when training began"),
    "a weight that is tied": ((Tied, None, list), True, "the parameter two.weight came to be one.weight in"),
    "an optimizer that loses": ((Loses, None, list), True, "the optimizers, after the first step, did not take back"),
    "other optimizers": ((Swaps, None, list), True, "replaced in training: SGD became Adam"),
    "a callback": ((Small, None, lambda: [Deaf()]), True, "the callbacks, before the first step, did not take back"),
    "a metric": ((Clips, None, list), True, "the metrics, after the first step, did not take back the state given"),
    "a sampler that forgets": ((SamplesForgetting, None, list), True, "Forgetting gives another order when it is run"),
    "a sampler that changes": (
        (SamplesAsked, None, list),
        True,
        "the loaders, before the first step, .*sampler.*loads",
    ),
    "a sampler that fills up": (
        (SamplesExpecting, None, list),
        True,
        r"copy_\(state(.|\n)*the loaders, after the first step",
    ),
    "a stream": ((Streams, None, list), True, "lock"),
    "a loader": ((Loops, None, list), True, "the train loader is a Looping with an __iter__ of its own"),
    "a loader's iterator": (
        (LoadsTailored, None, list),
        True,
        "the train loader is a Tailored with a _get_iterator of its own",
    ),
    "a hook that comes": ((HookedLate, None, list), False, r"hooks:doubled in layer\.forward_hooks is new\. A res"),
    "a hook of a tensor that comes": (
        (TensorHookedLate, None, list),
        False,
        r"hooks:TensorHookedLate\S+<lambda> in tensor layer\.weight\.backward_hooks is new\. A res",
    ),
    "functions that are appended": ((Appends, None, list), False, r"set in training to .* module\.acts\.0 \(now "),
    "a function of another's name": (
        (ChoosesLate, None, list),
        False,
        r"set in training to .* module\.act \(now \S+:times.<locals>.<lambda>, of other code\)",
    ),
    "a method of its own": (
        (Patched, None, list),
        False,
        r"set in training to .* module\.gain \(now .*Patched\.factor",
    ),
    "a linked list": (
        (Linked, None, list),
        False,
        r"nested deeper than 64 levels, and from there on not part of snapshots: module\.newest\.1\.1",
    ),
    "a hook that goes": (
        (Unhooked, None, list),
        False,
        r"<lambda> in act\.backward_hooks is gone\. A",
    ),
    "None first": ((Opening, None, list), False, "attribute numbers, a generator, is not part of snapshots"),
    "beside the module": (
        (Small, Opened, lambda: [LockedCallback()]),
        False,
        r"not part of snapshots: callbacks\.LockedCallback\.lock, a lock, data\.module\.locks\.0, a lock, "
        r"data\.module\.locks\.1, a lock, data\.training\.file, a TextIOWrapper, "
        r"samplers\.sampler of training\.lock, a lock\. ",
    ),
    "of a sampler": (
        (Small, Opened, list),
        False,
        r"not part of snapshots: .*samplers\.sampler of training\.lock, a lock\. If",
    ),
    "of a loader": (
        (LoadsLocked, None, list),
        False,
        r"not part of snapshots: loaders\.training\.lock, a lock\. If",
    ),
    "workers that read the module": (
        (ReadsItselfInWorkers, None, list),
        False,
        r"the workers of the train loader read the module as it was when they were started \(module\)\. A run",
    ),
    "a stream that cannot be copied": (
        (TellsLockedStream, None, list),
        False,
        r"LockedStream: \S+ has changed since the epoch began, which reads the data as they were then\. A run",
    ),
    "data of a library": (
        (WritesTensors, OfTensors, list),
        False,
        r"part of no snapshot: data\.module\.dataset\.tensors\[0\]",
    ),
    "many of a kind": ((Locked, None, list), False, r"not part of snapshots"),
    "a function": ((ActsOtherwise, None, list), False, r"what no snapshot can hold: module\.act \(now .*tanh"),
    "on the class": ((CountsOnClass, None, list), False, r"part of no snapshot: class CountsOnClass: calls \(0, now 1"),
    "in a global": ((CountsInGlobal, None, list), False, r"part of no snapshot: global .*CALLS\['factor'\] \(0, now 1"),
    "large data": ((Weighs, None, list), False, r"part of no snapshot: data\.training\.weights"),
    "in a default": ((InDefault, None, list), False, r"part of no snapshot: function remember: seen holds"),
    "in a default of its own": (
        (InOwnDefault, None, list),
        False,
        r"part of no snapshot: function InOwnDefault\.factor: seen\['calls'\] \(0, now 1",
    ),
    "on a function": ((OnFunction, None, list), False, r"part of no snapshot: function tick: calls \(0, now 1"),
    "in a descriptor": ((InDescriptor, None, list), False, r"part of no snapshot: class InDescriptor: gain\.values"),
    "in an enumeration": ((InEnum, None, list), False, r"class Phase: WARM\.seen \(0, now 1"),
    "in a singleton": ((InSingleton, None, list), False, r"class Shared: _made"),
    "in a context": ((InContext, None, list), False, r"global .*DEPTH \(None, now 1"),
    "on another class": (
        (OnAutogradFunction, None, list),
        False,
        r"class Louder: calls \(0, now 1",
    ),
    "in another file": ((CountsInHelper, None, list), False, r"part of no snapshot: global .*helper\.STEPS \(\d+, now"),
    "in a file that is imported where it is used": (
        (CountsWhereImported, None, list),
        False,
        r"part of no snapshot: global .*helper\.STEPS \(\d+, now \d+",
    ),
    "on a class of another file": (
        (CountsOnClassOfHelper, None, list),
        False,
        r"part of no snapshot: class Numbered: ids \(count\(\d+\), now count\(",
    ),
    "a function of another file": (
        (SwapsInHelper, None, list),
        False,
        r"part of no snapshot: global .*helper\.act \(\S+:soft, now \S+:hard\)",
    ),
    "a collate that counts": ((CountsInCollate, None, list), True, "CountingCollate gave another batch"),
    "a collate that counts in a worker": ((CountsInWorker, None, list), True, "CountingCollate gave another batch"),
    "data that keep what they drew": ((KeepsDraws, None, list), True, "KeepingRows draws random numbers when it is f"),
}


#: name -> what makes the module, the data or None, and the callbacks
Made = tuple[Callable[[], Small], Callable[[], Any] | None, Callable[[], list[Callback]]]


_MODULES: list[type[Small]] = [
    *(Dropping, Tagged, Private, Tuned, SharedDeque, SharedDict, Hooked, Counted, Viewed, ViewedLate, Tensors),
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
        Derived,
        Leaf,
        OfFunctions,
        TellsItsSampler,
        Keyed,
        Gathering,
        Moved,
        Plain,
        Weighed,
    ),
    *(LateUnderValidation, OfTorch, OnTrainer, Wrapping, DrawsInHelper, Chooses, TensorHooked),
    *(
        Iterated,
        Numbers,
        Queued,
        TellsWorkers,
        Warming,
        TakesAnother,
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
    ),
]


KEPT: dict[str, Made] = {kind.__name__: (kind, None, list) for kind in _MODULES}


KEPT |= {
    "callback": (Small, None, lambda: [Forgetful()]),
    "the class of a callback": (Small, None, lambda: [Rising()]),
    "data of the module": (Watching, None, lambda: [Curriculum()]),
    "data": (Telling, Counting, list),
    "an order in data": (Reordered, None, list),
    "data that torch wraps": (TellingWrapped, Wrapped, list),
}
