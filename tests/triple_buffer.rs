//! The triple buffer, checked in every state that writer, persister, store, crashes and rewinds can reach.

use evermoe::Result;
use evermoe::persist::{Event, Slot, TripleBuffer};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

type Next = fn(TripleBuffer, Event) -> Result<TripleBuffer>;

/// The buffer, and the actual state of memory and store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct World {
    buffer: TripleBuffer,
    /// The version of which the slot has all bytes; none while they change.
    memory: [Option<u64>; 3],
    /// Slot and version that the persister reads.
    reading: Option<(usize, u64)>,
    /// The newest version in the store; the persister reports it later.
    store: Option<u64>,
    /// The newest version that the persister has reported as durable.
    durable: Option<u64>,
    /// The newest version that was ever begun.
    newest: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Begin,
    Commit,
    Abandon,
    Persist,
    /// The store has the entire version, which is not known yet.
    Store,
    /// The persister reports it.
    Durable,
    Failed,
    Rewind(u64),
    /// The process is killed; the next one finds its memory.
    Crash,
    /// The machine is lost, memory and all.
    LoseHost,
}

impl World {
    fn new() -> Self {
        Self {
            buffer: TripleBuffer::default(),
            memory: [None; 3],
            reading: None,
            store: None,
            durable: None,
            newest: 0,
        }
    }

    fn actions(&self) -> Vec<Action> {
        let mut found = vec![Action::Crash, Action::LoseHost];
        match self.buffer.writing() {
            Some(_) => found.extend([Action::Commit, Action::Abandon]),
            None => found.push(Action::Begin),
        }
        match self.reading {
            Some((_, version)) if self.store >= Some(version) => found.push(Action::Durable),
            Some(_) => found.extend([Action::Store, Action::Failed]),
            None if self.buffer.next_to_persist().is_some() => found.push(Action::Persist),
            None => {}
        }
        // A version in the store is on every rank, so no recovery goes behind it.
        found.extend((self.store.unwrap_or(0)..self.newest).map(Action::Rewind));
        found
    }

    /// Applies the action to the bytes and, through `next`, to the buffer.
    fn after(mut self, action: Action, next: Next) -> std::result::Result<Self, String> {
        let event = match action {
            Action::Begin => Event::Begin(self.newest + 1),
            Action::Commit => Event::Commit,
            Action::Abandon => Event::Abandon,
            Action::Persist => Event::Persist,
            Action::Durable => Event::Durable,
            Action::Failed => Event::Failed,
            Action::Rewind(version) => Event::Rewind(version),
            Action::Crash | Action::LoseHost => Event::Restart(self.store),
            Action::Store => {
                let (slot, version) = self.reading.ok_or("nothing is persisted")?;
                if self.memory[slot] != Some(version) {
                    return Err(format!("the store got other bytes than those of version {version}"));
                }
                self.store = Some(version);
                return Ok(self);
            }
        };
        let before = self.buffer;
        self.buffer = match action {
            Action::LoseHost => TripleBuffer::default(),
            _ => next(before, event).map_err(|error| format!("{action:?} is refused: {error}"))?,
        };
        self.touch(action, before)?;
        Ok(self)
    }

    fn touch(&mut self, action: Action, before: TripleBuffer) -> std::result::Result<(), String> {
        match action {
            Action::Begin => {
                self.newest += 1;
                self.memory[self.buffer.writing().ok_or("nothing is written")?] = None;
            }
            Action::Commit => self.memory[before.writing().ok_or("nothing was written")?] = Some(self.newest),
            Action::Persist => {
                let slot = self.buffer.persisting().ok_or("nothing is persisted")?;
                let version = self.buffer.slots[slot].complete().ok_or("no complete version is persisted")?;
                if self.reading.replace((slot, version)).is_some() {
                    return Err("two are persisted at once".into());
                }
            }
            Action::Durable => {
                self.durable = self.reading.take().map(|(_, version)| version);
            }
            Action::Failed => self.reading = None,
            Action::Rewind(version) => {
                // Bytes of undone steps, which are worthless.
                self.memory = self.memory.map(|held| held.filter(|&held| held <= version));
                self.reading = self.reading.filter(|&(_, read)| read <= version);
                self.newest = version;
            }
            Action::Crash => (self.reading, self.durable) = (None, self.store),
            Action::LoseHost => (self.reading, self.memory, self.durable) = (None, [None; 3], self.store),
            Action::Abandon | Action::Store => {}
        }
        Ok(())
    }

    /// Properties of every state, and of every transition.
    fn check(&self, before: &Self, action: Action) -> std::result::Result<(), String> {
        for (slot, memory) in self.buffer.slots.iter().zip(self.memory) {
            if slot.complete().is_some() && memory != slot.complete() {
                return Err(format!("{slot:?} does not hold its version"));
            }
        }
        let count = |kind: fn(&Slot) -> bool| self.buffer.slots.iter().filter(|&slot| kind(slot)).count();
        for kind in [
            |slot: &Slot| matches!(slot, Slot::Writing(_)),
            |slot: &Slot| matches!(slot, Slot::Persisting(_)),
            |slot: &Slot| matches!(slot, Slot::Recovery(_)),
        ] {
            if count(kind) > 1 {
                return Err("two slots in a state of which there is one".into());
            }
        }
        let recovery =
            |world: &Self| world.buffer.recovery().and_then(|slot| world.buffer.slots[slot].complete());
        if recovery(self).is_some() && recovery(self) != self.durable {
            return Err(format!("the recovery version is {:?}, not {:?}", recovery(self), self.durable));
        }
        if recovery(before).is_some() && recovery(self) < recovery(before) && action != Action::LoseHost {
            return Err("the recovery version is gone".into());
        }
        if self.store < before.store {
            return Err("the store lost a version".into());
        }
        if self.buffer.writing().is_none() && self.buffer.next_to_write().is_none() {
            return Err("the writer has to wait".into());
        }
        Ok(())
    }

    /// The same with versions numbered 1, 2, … in their order: only the order matters.
    fn relative(&self) -> Self {
        let slots = self.buffer.slots.iter().filter_map(|slot| match *slot {
            Slot::Writing(version) => Some(version),
            slot => slot.complete(),
        });
        let held = self.memory.iter().flatten().copied().chain(self.reading.map(|(_, version)| version));
        let rest = [self.store, self.durable, Some(self.newest).filter(|&newest| newest > 0)];
        let versions: BTreeSet<u64> = slots.chain(held).chain(rest.into_iter().flatten()).collect();
        let number: BTreeMap<u64, u64> = versions.into_iter().zip(1..).collect();
        let of = |version: u64| number.get(&version).copied().unwrap_or(0);
        let slots = self.buffer.slots.map(|slot| match slot {
            Slot::Empty => Slot::Empty,
            Slot::Writing(version) => Slot::Writing(of(version)),
            Slot::Snapshot(version) => Slot::Snapshot(of(version)),
            Slot::Persisting(version) => Slot::Persisting(of(version)),
            Slot::Recovery(version) => Slot::Recovery(of(version)),
        });
        Self {
            buffer: TripleBuffer { slots },
            memory: self.memory.map(|version| version.map(of)),
            reading: self.reading.map(|(slot, version)| (slot, of(version))),
            store: self.store.map(of),
            durable: self.durable.map(of),
            newest: of(self.newest),
        }
    }
}

/// All reachable states, or the shortest path to a wrong one.
fn explore(next: Next) -> std::result::Result<BTreeSet<World>, String> {
    let mut seen = BTreeSet::from([World::new()]);
    let mut queue = VecDeque::from([(World::new(), Vec::new())]);
    while let Some((world, way)) = queue.pop_front() {
        for action in world.actions() {
            let mut way = way.clone();
            way.push(action);
            let found = world.after(action, next).and_then(|after| {
                after.check(&world, action)?;
                Ok(after.relative())
            });
            let after = found.map_err(|wrong| format!("{wrong} after {way:?}: {world:?}"))?;
            if seen.insert(after) {
                queue.push_back((after, way));
            }
        }
    }
    Ok(seen)
}

#[test]
fn every_state_is_safe_and_the_writer_never_waits() {
    let states = explore(TripleBuffer::next).unwrap();
    // The interesting ones are among them: all three in use, and a version in the store that is not known yet.
    let busy = |world: &&World| {
        world.buffer.recovery().is_some()
            && world.buffer.persisting().is_some()
            && world.buffer.writing().is_some()
    };
    assert!(states.iter().any(|world| busy(&world)));
    assert!(states.iter().any(|world| busy(&world) && world.store > world.durable));
    assert!(states.len() > 300, "{} states", states.len());
}

/// Frees the recovery version when the persister starts, not when it is done.
fn frees_early(buffer: TripleBuffer, event: Event) -> Result<TripleBuffer> {
    let mut after = buffer.next(event)?;
    if let (Event::Persist, Some(slot)) = (event, after.recovery()) {
        after.slots[slot] = Slot::Empty;
    }
    Ok(after)
}

/// Overwrites the oldest version that is not being read, as two buffers would do.
fn overwrites_the_oldest(buffer: TripleBuffer, event: Event) -> Result<TripleBuffer> {
    let after = buffer.next(event)?;
    let (Event::Begin(version), None) = (event, buffer.slots.iter().position(|&slot| slot == Slot::Empty))
    else {
        return Ok(after);
    };
    let free = (0..3).filter(|&slot| Some(slot) != buffer.persisting());
    let oldest = free.min_by_key(|&slot| buffer.slots[slot].complete());
    let mut after = buffer;
    after.slots[oldest.unwrap_or(0)] = Slot::Writing(version);
    Ok(after)
}

/// Silently overwrites the version that the persister reads.
fn overwrites_what_is_read(buffer: TripleBuffer, event: Event) -> Result<TripleBuffer> {
    let (Event::Begin(version), Some(slot)) = (event, buffer.persisting()) else { return buffer.next(event) };
    let mut after = buffer;
    after.slots[slot] = Slot::Writing(version);
    Ok(after)
}

/// Assumes that the version being persisted reached the store before the crash.
fn believes_in_the_store(buffer: TripleBuffer, event: Event) -> Result<TripleBuffer> {
    let (Event::Restart(durable), Some(slot)) = (event, buffer.persisting()) else {
        return buffer.next(event);
    };
    buffer.next(Event::Restart(buffer.slots[slot].complete().max(durable)))
}

/// Keeps versions from before a rewind.
fn keeps_what_never_was(buffer: TripleBuffer, event: Event) -> Result<TripleBuffer> {
    let after = buffer.next(event)?;
    Ok(if matches!(event, Event::Rewind(_)) { buffer } else { after })
}

#[test]
fn planted_faults_are_found() {
    let wrong = |next: Next| explore(next).unwrap_err();
    assert!(wrong(frees_early).starts_with("the recovery version is gone"), "{}", wrong(frees_early));
    let message = wrong(overwrites_the_oldest);
    assert!(message.starts_with("the recovery version is gone"), "{message}");
    let message = wrong(overwrites_what_is_read);
    assert!(message.starts_with("the store got other bytes"), "{message}");
    let message = wrong(believes_in_the_store);
    assert!(message.starts_with("the recovery version is Some"), "{message}");
    let message = wrong(keeps_what_never_was);
    assert!(message.contains("does not hold its version"), "{message}");
}

/// All events in all states of three slots with versions up to 3, including those that no run reaches.
#[test]
fn a_refused_event_says_what_was_expected() {
    let kinds = [Slot::Writing, Slot::Snapshot, Slot::Persisting, Slot::Recovery];
    let all: Vec<Slot> = kinds.iter().flat_map(|kind| (1..4).map(kind)).chain([Slot::Empty]).collect();
    let events =
        [Event::Begin(2), Event::Begin(9), Event::Commit, Event::Abandon, Event::Persist, Event::Durable];
    let more = [Event::Failed, Event::Rewind(2), Event::Restart(None), Event::Restart(Some(2))];
    let mut refused = 0;
    for number in 0..all.len().pow(3) {
        let slots = [0, 1, 2].map(|place| all[number / all.len().pow(place) % all.len()]);
        let buffer = TripleBuffer { slots };
        for event in events.into_iter().chain(more) {
            if let Err(error) = buffer.next(event) {
                let (message, name) = (error.to_string(), format!("{event:?}: "));
                assert!(message.starts_with(&name), "{message}");
                refused += 1;
            }
        }
    }
    assert!(refused > 0);
}
