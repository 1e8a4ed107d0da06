//! PEC's triple buffer: transitions that decide which of three slots of host memory the writer and the persister may
//! use.
//!
//! ```text
//!            Begin            Commit             Persist                Durable
//! Empty ───────────► Writing ────────► Snapshot ─────────► Persisting ──────────► Recovery
//!   ▲  ▲                │ Abandon        │ ▲                    │ Failed             │
//!   │  └────────────────┘          Begin │ └────────────────────┘                    │
//!   │                      (oldest only) ▼                                           │
//!   │                                 Writing                                        │
//!   └────────────────────── the successor's Durable ─────────────────────────────────┘
//! ```
//!
//! At most one slot is being written, one is being persisted and one holds the recovery version. So with three slots
//! the writer never waits for the persister. `tests/triple_buffer.rs` checks all reachable states, with crashes between
//! any two events.

use crate::ensure;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Content of a slot; the number is the version, which is the step that it reflects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Slot {
    /// Nothing.
    Empty,
    /// Part of a version that the writer is copying.
    Writing(u64),
    /// A complete version; it may be persisted, and overwritten.
    Snapshot(u64),
    /// A complete version that the persister reads.
    Persisting(u64),
    /// The newest complete version that is also in the store.
    Recovery(u64),
}

impl Slot {
    /// Returns the version if the slot holds a complete one.
    pub fn complete(self) -> Option<u64> {
        match self {
            Self::Snapshot(version) | Self::Persisting(version) | Self::Recovery(version) => Some(version),
            Self::Empty | Self::Writing(_) => None,
        }
    }
}

/// Event of the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Event {
    /// The writer starts a version that is newer than all others.
    Begin(u64),
    /// The version being written is complete and its checksum is computed.
    Commit,
    /// The version being written will never be complete.
    Abandon,
    /// The persister starts with the newest snapshot.
    Persist,
    /// The persisted version is in the store, including the manifest, on every rank that has a part of it.
    Durable,
    /// The store refused the version; it may be tried again.
    Failed,
    /// The job resumes from this version; newer ones belong to steps that were undone.
    Rewind(u64),
    /// A new process has started; this is the newest of the slots' versions that is in the store.
    Restart(Option<u64>),
}

/// A buffer of three slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TripleBuffer {
    /// The states, by position of the slot in memory.
    pub slots: [Slot; 3],
}

impl Default for TripleBuffer {
    fn default() -> Self {
        Self { slots: [Slot::Empty; 3] }
    }
}

impl TripleBuffer {
    /// The slot that is being written.
    pub fn writing(&self) -> Option<usize> {
        self.slots.iter().position(|slot| matches!(slot, Slot::Writing(_)))
    }

    /// The slot that is being persisted.
    pub fn persisting(&self) -> Option<usize> {
        self.slots.iter().position(|slot| matches!(slot, Slot::Persisting(_)))
    }

    /// The slot of the recovery version.
    pub fn recovery(&self) -> Option<usize> {
        self.slots.iter().position(|slot| matches!(slot, Slot::Recovery(_)))
    }

    /// The slot with the newest complete version, which survives a crash of the process.
    pub fn newest(&self) -> Option<usize> {
        let complete = (0..3).filter(|&slot| self.slots[slot].complete().is_some());
        complete.max_by_key(|&slot| self.slots[slot].complete())
    }

    /// The slot that [`Event::Persist`] would take: the newest snapshot, unless one is being persisted.
    pub fn next_to_persist(&self) -> Option<usize> {
        let newest = self.snapshots().max_by_key(|&slot| self.slots[slot]);
        newest.filter(|_| self.persisting().is_none())
    }

    /// The slot that [`Event::Begin`] would take: an empty one, or the oldest snapshot. None only if a writer has begun
    /// already.
    pub fn next_to_write(&self) -> Option<usize> {
        if self.writing().is_some() {
            return None;
        }
        let empty = self.slots.iter().position(|&slot| slot == Slot::Empty);
        empty.or_else(|| self.snapshots().min_by_key(|&slot| self.slots[slot]))
    }

    /// Returns the buffer after an event.
    ///
    /// ```
    /// use evermoe::persist::{Event::*, Slot, TripleBuffer};
    /// let after = |events: &[_]| events.iter().try_fold(TripleBuffer::default(), |buffer, &event| buffer.next(event));
    /// // Version 3 is in the store, 4 is being persisted, and 5 is complete: 6 overwrites 5, which is not being read.
    /// let buffer = after(&[Begin(3), Commit, Persist, Durable, Begin(4), Commit, Persist, Begin(5), Commit, Begin(6)])?;
    /// assert_eq!(buffer.slots, [Slot::Recovery(3), Slot::Persisting(4), Slot::Writing(6)]);
    /// // Only when 4 is durable does the slot of 3 become free.
    /// assert_eq!(buffer.next(Durable)?.slots, [Slot::Empty, Slot::Recovery(4), Slot::Writing(6)]);
    /// # Ok::<(), evermoe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if the event is impossible in this state; the buffer is then unchanged.
    pub fn next(self, event: Event) -> Result<Self> {
        match event {
            Event::Begin(version) => self.begin(version),
            Event::Commit => self.replace(self.writing(), event, Slot::Snapshot),
            Event::Abandon => self.replace(self.writing(), event, |_| Slot::Empty),
            Event::Persist => self.replace(self.next_to_persist(), event, Slot::Persisting),
            Event::Failed => self.replace(self.persisting(), event, Slot::Snapshot),
            Event::Durable => self.durable(),
            Event::Rewind(version) => self.rewind(version),
            Event::Restart(durable) => Ok(self.restart(durable)),
        }
    }

    fn snapshots(&self) -> impl Iterator<Item = usize> {
        (0..3).filter(|&slot| matches!(self.slots[slot], Slot::Snapshot(_)))
    }

    fn replace(mut self, slot: Option<usize>, event: Event, make: fn(u64) -> Slot) -> Result<Self> {
        let Some(slot) = slot else { return Err(self.refuse(event)) };
        if let Slot::Writing(version) | Slot::Snapshot(version) | Slot::Persisting(version) = self.slots[slot]
        {
            self.slots[slot] = make(version);
        }
        Ok(self)
    }

    fn refuse(&self, event: Event) -> Error {
        let expected = match event {
            Event::Begin(_) => "no slot that is being written",
            Event::Commit | Event::Abandon => "a slot that is being written",
            Event::Persist => "a snapshot, and no slot that is being persisted",
            _ => "a slot that is being persisted",
        };
        Error::invalid(format!("{event:?}: expected {expected}, got {:?}", self.slots))
    }

    fn begin(mut self, version: u64) -> Result<Self> {
        let newest = self.newest().and_then(|slot| self.slots[slot].complete());
        ensure!(
            newest.is_none_or(|newest| newest < version),
            "Begin({version}): expected a version after {}, the newest one; rewind first",
            newest.unwrap_or(0)
        );
        let Some(slot) = self.next_to_write() else { return Err(self.refuse(Event::Begin(version))) };
        self.slots[slot] = Slot::Writing(version);
        Ok(self)
    }

    /// The old recovery version and older ones are dropped in the same transition that adds the new one.
    fn durable(self) -> Result<Self> {
        let mut next = self.replace(self.persisting(), Event::Durable, Slot::Recovery)?;
        let newest = next.slots.iter().filter(|slot| matches!(slot, Slot::Recovery(_))).max().copied();
        for slot in &mut next.slots {
            if slot.complete() < newest.and_then(Slot::complete) && slot.complete().is_some() {
                *slot = Slot::Empty;
            }
        }
        Ok(next)
    }

    fn rewind(mut self, to: u64) -> Result<Self> {
        if let Some(Slot::Recovery(version)) = self.recovery().map(|slot| self.slots[slot]) {
            ensure!(
                version <= to,
                "Rewind({to}): the recovery version is {version}, which every rank can reach; resume from it"
            );
        }
        for slot in &mut self.slots {
            match *slot {
                Slot::Writing(version) | Slot::Snapshot(version) | Slot::Persisting(version)
                    if version > to =>
                {
                    *slot = Slot::Empty;
                }
                _ => {}
            }
        }
        Ok(self)
    }

    /// A restart drops the version that the old process was writing. Only the store knows whether a version that was
    /// being persisted arrived. A version newer than the store's becomes a snapshot again, even if the store had it and
    /// lost it.
    fn restart(self, durable: Option<u64>) -> Self {
        let slots = self.slots.map(|slot| match slot.complete() {
            Some(version) if Some(version) == durable => Slot::Recovery(version),
            Some(version) if Some(version) > durable => Slot::Snapshot(version),
            _ => Slot::Empty,
        });
        Self { slots }
    }
}
