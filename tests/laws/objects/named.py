"""Objects under the laws: what does not come back, and is named."""

from typing import Any

from laws.objects.code import (
    InCache,
    InCacheOfMethod,
    InContext,
    InDatabase,
    InDefault,
    InDescriptor,
    InEnum,
    InEnvironment,
    InLibrary,
    InOwnDefault,
    InSettings,
    InSingleton,
    InSparseGlobal,
    OnAutogradFunction,
    OnFunction,
    SwapsBuiltin,
    SwapsClass,
)
from laws.objects.derived import DerivedInC, MakesLate
from laws.objects.files import CountsInHelper, CountsOnClassOfHelper, SwapsInHelper
from laws.objects.functions import (
    Appends,
    Bends,
    ChoosesLate,
    Fits,
    InOwnModule,
    Linked,
    Patched,
    WeakProxy,
    WeakWithCallback,
)
from laws.objects.hooks import HookedLate, TensorHookedLate, Unhooked
from laws.objects.imported import CountsWhereImported
from laws.objects.library import Narrows, Plays
from laws.objects.loaders import (
    CollatesToLongest,
    LoadsLocked,
    LoadsTailored,
    Loops,
    ReadsItselfInWorkers,
    RemembersInWorkers,
    TellsLockedStream,
)
from laws.objects.read_data import ReadsLongList, ReadsPictures, ReadsTable, TellsWorkersThatRead
from laws.objects.samplers import SamplesAsked, SamplesExpecting, SamplesForgetting, Streams
from laws.objects.small import Small
from laws.objects.structure import Frozen, Retraced, Tied
from laws.objects.surroundings import (
    ActsOtherwise,
    CountsInCollate,
    CountsInWorker,
    CountsOnClass,
    KeepsDraws,
    LockedCallback,
    Opened,
    Opening,
    Pruned,
)
from laws.objects.unsaved import Clips, CountsInGlobal, Deaf, Loses, Swaps, Weighs
from laws.objects.values import Locked
from laws.objects.views import SlicedLate

#: name -> what makes it, whether it is refused, and the words
NAMED: dict[str, tuple[Any, bool, str]] = {
    "a parameter that goes": ((Pruned, None, list), True, "the parameter layer.weight was there when training began"),
    "a parameter that is a buffer": ((Frozen, None, list), True, "the parameter one.weight was there when training"),
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
    "an array that comes to be a view": (
        (SlicedLate, None, list),
        False,
        r"these came to share memory in training, which writes into it: module\.base, module\.half\.",
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
    "a graph that is changed": (
        (Retraced, None, list),
        False,
        r"set in training to .* module\.traced\._graph \(now torch\.fx\.graph:Graph, of other code\)",
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
    "of classes derived in C": (
        (DerivedInC, None, list),
        False,
        r"stop, a Stop, is not(.|\n)*point, a Point, (.|\n)*day, a Day, (.|\n)*"
        r"grid, a Grid, (.|\n)*a Waiting, (.|\n)*rows, a meta Tensor, is",
    ),
    "what its class alone makes": (
        (MakesLate, None, list),
        False,
        r"set in training to .* module\.made \(now \S+:Made\)",
    ),
    "what is called": ((Bends, None, list), False, r"part of no snapshot: module\.curve \(\[2\] \w+, now \[2\] \w+\)"),
    "what is called, by its attributes": (
        (Fits, None, list),
        False,
        r"part of no snapshot: module\.curve\.\w+ \(float64\[2\] \w+, now float64\[2\] \w+\)",
    ),
    "an object of a library": (
        (Narrows, None, list),
        False,
        r"part of no snapshot: module\.wrapper\.width \(70, now 7\d\)",
    ),
    "an environment": (
        (Plays, None, list),
        False,
        r"attribute env, a CartPole, is not part of snapshots; .*shows how, under An environment of gymnasium",
    ),
    "a weak reference with a callback": (
        (WeakWithCallback, None, list),
        False,
        r"attribute newest, a ReferenceType, is not part of snapshots",
    ),
    "a module that code makes": (
        (InOwnModule, None, list),
        False,
        r"attribute space, a module, is not part of snapshots",
    ),
    "a hook that goes": ((Unhooked, None, list), False, r"<lambda> in act\.backward_hooks is gone\. A"),
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
    "of a loader": ((LoadsLocked, None, list), False, r"not part of snapshots: loaders\.training\.lock, a lock\. If"),
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
        (ReadsPictures, None, list),
        False,
        r"part of no snapshot: data\.training\.dataset\.labels\[0\] \(0\.0, now 1\.0\)",
    ),
    "data of a library that are no data set": (
        (ReadsTable, None, list),
        False,
        r"part of no snapshot: data\.training\.dataset\['view'\] \('train', now 'part 0'\)",
    ),
    "a long list in data": (
        (ReadsLongList, None, list),
        False,
        r"part of no snapshot: data\.training \(torch\)\.indices \(1200 items \w+, now 1200 items \w+\)",
    ),
    "memory that workers share": (
        (TellsWorkersThatRead, None, list),
        False,
        r"data set\.step\._obj has changed in memory that the workers of a loader share, while they read ahead",
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
    "in a cache": ((InCache, None, list), False, r"global .*\.direction \(0 results cached, now 1"),
    "in a method's cache": ((InCacheOfMethod, None, list), False, r"InCacheOfMethod: scale \(0 results cached, now 1"),
    "in the environment": ((InEnvironment, None, list), False, r"environment variable FACTOR_CALLS \(missing, now"),
    "in a setting of torch": (
        (InSettings, None, list),
        False,
        r"part of no snapshot: torch\.get_float32_matmul_precision\(\) \('highest', now 'high'\)",
    ),
    "in a library": (
        (InLibrary, None, list),
        False,
        r"library function torch\.nn\.functional\.relu \(torch\.nn\.functional:relu, now \S+:elu\)",
    ),
    "in a database": ((InDatabase, None, list), False, r"attribute rows, a Connection, is not part of snapshots"),
    "in a sparse global": ((InSparseGlobal, None, list), False, r"snapshot: global .*GRAPH \(float32\[3, 3\]"),
    "in a context": ((InContext, None, list), False, r"global .*DEPTH \(None, now 1"),
    "on another class": ((OnAutogradFunction, None, list), False, r"class Louder: calls \(0, now 1"),
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
    "a function of C": (
        (SwapsBuiltin, None, list),
        False,
        r"snapshot: global \S+\.act \(torch:\S+\.relu, now torch:\S+\.tanh\)",
    ),
    "classes that are named": (
        (SwapsClass, None, list),
        False,
        r"snapshot: class SwapsClass: norm \(\S+:LayerNorm, now \S+:RMSNorm\), "
        r"global \S+\.KINDS\['act'\] \(\S+:ReLU, now \S+:GELU\)",
    ),
    "a collate that counts": ((CountsInCollate, None, list), True, "CountingCollate gave another batch"),
    "a collate that counts in a worker": ((CountsInWorker, None, list), True, "CountingCollate gave another batch"),
    "data that remember, in a worker": (
        (RemembersInWorkers, None, list),
        True,
        r"of Worded gave another batch than where nothing was read before it: .* \(data set/\w+",
    ),
    "a collate that remembers, in a worker": (
        (CollatesToLongest, None, list),
        True,
        r"Longest of Worded gave another batch than where .* \(\S+",
    ),
    "a weak proxy whose object is gone": (
        (WeakProxy, None, list),
        False,
        r"attribute newest, a ProxyType, is not part",
    ),
    "data that keep what they drew": ((KeepsDraws, None, list), True, "KeepingRows draws random numbers when it is f"),
}
