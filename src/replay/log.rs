//! The log: records of many units, in order, in bounded memory, until their steps are repeated.
//!
//! ```text
//! version of the state ─┬─ entry │ entry │ entry ─┬─ newest record      take: some entries from the front, as one batch
//!                       └── steps that are logged ┘                     apply_now: no room for one more
//! ```
//!
//! Steps with zero gradients, and steps without effect, take no memory except for their numbers; consecutive equal ones
//! are one entry.

use super::entry::{self, Entry, Gradient, cost};
use super::record::{Fault, Header, Kind, PROOF_BYTES, Record, Rule};
use crate::cpu::Parallel;
use crate::ensure;
use crate::error::Result;
use std::collections::{BTreeMap, VecDeque};

pub use super::entry::Stored;

/// Function that stores the step of a record: unit, header, checksum, gradient.
type Keep = fn(&mut Log, usize, &Header, u64, Gradient);

/// Log of the steps of several units.
#[derive(Debug)]
pub struct Log {
    places: BTreeMap<u64, usize>,
    units: Vec<Unit>,
    bytes: usize,
    limit_bytes: usize,
}

#[derive(Debug, Default)]
struct Unit {
    elements: usize,
    state_bytes: usize,
    /// Number of full states received; entries of an earlier one are worthless.
    epoch: u64,
    /// Version of the state; none before the first state.
    version: Option<u64>,
    newest: u64,
    /// Checksum of the newest record, which distinguishes it from another one of the same step.
    checksum: u64,
    /// Whether a record was lost: the log stays valid, but nothing can be appended.
    broken: bool,
    entries: VecDeque<Entry>,
    /// The step after the newest, which the trainers have not agreed on yet.
    held: Option<Held>,
    /// Steps up to the state's, with the trainer's digests of the state after them.
    proofs: VecDeque<(u64, u64)>,
    bytes: usize,
}

/// A complete step that the vote may still reject.
#[derive(Debug)]
struct Held {
    header: Header,
    checksum: u64,
    gradient: Gradient,
}

/// Outcome of a record.
#[derive(Debug, PartialEq)]
pub enum Accepted {
    /// The record was logged.
    Logged {
        /// Index of the record's unit.
        unit: usize,
    },
    /// The record was in the log already.
    Duplicate {
        /// Index of the record's unit.
        unit: usize,
    },
    /// There is no room for the record: apply some logged steps, then offer it again.
    ApplyNow {
        /// Index of the record's unit.
        unit: usize,
    },
    /// The record has the trainer's digest of the state after the newest step; see [`Log::proof`].
    Proof {
        /// Index of the record's unit.
        unit: usize,
    },
    /// The record is the unit's full state: replace the state by it, then call [`Log::installed`].
    State {
        /// Index of the record's unit.
        unit: usize,
        /// Digest of the state, which is the record's payload: [`state_digest`](super::state_digest).
        digest: u64,
    },
}

/// Steps of a unit that are applied in one pass.
#[derive(Debug)]
pub struct Batch {
    /// Epoch to pass to [`Log::applied`].
    pub epoch: u64,
    /// The unit's version after the batch.
    pub version: u64,
    /// The unit's own step count after the batch; none if it takes no step in the batch.
    pub t: Option<u64>,
    /// Numbers of the steps, all of one optimizer, concatenated; empty if nothing changes.
    pub numbers: Vec<f32>,
    /// A gradient for each step; none for zeros.
    pub gradients: Vec<Option<Stored>>,
    /// Bytes that count against the limit until [`Log::applied`].
    pub bytes: usize,
    /// Whether the trainer has sent its digest of the state after the batch; see [`Log::proof`].
    pub has_proof: bool,
    /// Digest of each gradient when it arrived; none if there is nothing left to compare.
    digests: Vec<Option<u64>>,
    /// Whether counts and numbers are unchanged.
    are_numbers_intact: bool,
}

impl Batch {
    fn from(version: u64, epoch: u64) -> Self {
        let (t, numbers, gradients, digests) = (None, Vec::new(), Vec::new(), Vec::new());
        Self {
            epoch,
            version,
            t,
            numbers,
            gradients,
            bytes: 0,
            has_proof: false,
            digests,
            are_numbers_intact: true,
        }
    }

    /// Whether the logged data is unchanged: no bit has flipped since it arrived.
    pub fn is_intact(&self, pool: &dyn Parallel) -> bool {
        let is_same = |(stored, digest): (&Option<Stored>, &Option<u64>)| match (stored, digest) {
            (Some(stored), Some(digest)) => entry::digest_of(stored, pool) == *digest,
            _ => true,
        };
        self.are_numbers_intact && self.gradients.iter().zip(&self.digests).all(is_same)
    }
}

impl Log {
    /// Creates an empty log of units, each given by the digest of its name, the elements of its gradient and the bytes
    /// of its state.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if two units have the same digest, or if the limit has no room for one gradient of the
    /// largest unit.
    pub fn new(units: &[(u64, usize, usize)], limit_bytes: usize) -> Result<Self> {
        let mut log = Self { places: BTreeMap::new(), units: Vec::new(), bytes: 0, limit_bytes };
        for (place, &(id, elements, state_bytes)) in units.iter().enumerate() {
            let twice = log.places.insert(id, place);
            ensure!(twice.is_none(), "units: number {place} has the digest of another one; rename it");
            let least = elements.saturating_mul(4).saturating_add(size_of::<Entry>());
            ensure!(
                least <= limit_bytes,
                "log_bytes: expected {least} or more, room for one gradient of the largest unit, got {limit_bytes}"
            );
            log.units.push(Unit { elements, state_bytes, ..Unit::default() });
        }
        Ok(log)
    }

    /// Bytes that are logged or being applied; never above the limit.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of units; their indices are below it.
    pub fn units(&self) -> usize {
        self.units.len()
    }

    /// The newest step that a unit can be brought to; none without a state.
    pub fn newest(&self, unit: usize) -> Option<u64> {
        self.units[unit].version.map(|_| self.units[unit].newest)
    }

    /// The version of a unit's state; none without one.
    pub fn version(&self, unit: usize) -> Option<u64> {
        self.units[unit].version
    }

    /// Whether a unit needs its full state before it can follow further steps.
    pub fn needs_state(&self, unit: usize) -> bool {
        self.units[unit].broken || self.units[unit].version.is_none()
    }

    /// The unit with the most logged bytes.
    pub fn fullest(&self) -> Option<usize> {
        (0..self.units.len())
            .filter(|&unit| !self.units[unit].entries.is_empty())
            .max_by_key(|&unit| self.units[unit].bytes)
    }

    /// Marks a unit's state as different from the log's: from now on, only a full state is accepted.
    pub fn forget(&mut self, unit: usize) {
        self.clear(unit);
        self.units[unit].version = None;
    }

    /// Announces that a unit gets its full state after `step` from elsewhere; [`Log::installed`] must follow.
    pub fn begin(&mut self, unit: usize, step: u64) {
        self.forget(unit);
        self.units[unit].newest = step;
    }

    /// Logs a record, or returns its fault; then the unit waits for its full state.
    ///
    /// # Errors
    /// The fault, and the unit if the record names a known one.
    pub fn accept(
        &mut self,
        bytes: &[u8],
        pool: &dyn Parallel,
    ) -> std::result::Result<Accepted, (Option<usize>, Fault)> {
        self.accept_checked(bytes, pool, |log, unit, header, checksum, gradient| {
            log.discard_unit(unit);
            log.push(unit, header, checksum, gradient);
        })
    }

    fn accept_checked(
        &mut self,
        bytes: &[u8],
        pool: &dyn Parallel,
        keep: Keep,
    ) -> std::result::Result<Accepted, (Option<usize>, Fault)> {
        let record = Record::parse(bytes).map_err(|fault| (self.named_in(bytes), fault))?;
        let Some(&unit) = self.places.get(&record.header.unit) else {
            return Err((None, Fault::WrongUnit(record.header.unit)));
        };
        self.accept_for(unit, &record, pool, keep).map_err(|fault| {
            self.units[unit].broken = true;
            (Some(unit), fault)
        })
    }

    /// The unit that a damaged record names, if any; it counts as having lost a record.
    fn named_in(&mut self, bytes: &[u8]) -> Option<usize> {
        let id = bytes.get(8..16)?.first_chunk().map(|id| u64::from_le_bytes(*id))?;
        let unit = *self.places.get(&id)?;
        self.units[unit].broken = true;
        Some(unit)
    }

    /// Like [`Log::accept`], but the step counts only after [`Log::release`], which may change its clipping. A later
    /// record of the same step replaces it.
    ///
    /// # Errors
    /// As [`Log::accept`].
    pub fn hold(
        &mut self,
        bytes: &[u8],
        pool: &dyn Parallel,
    ) -> std::result::Result<Accepted, (Option<usize>, Fault)> {
        self.discard_of(bytes);
        self.accept_checked(bytes, pool, Self::hold_back)
    }

    /// Accepts the held steps: the trainers have agreed on them, with gradients multiplied by `clip` before the
    /// optimizer saw them.
    pub fn release(&mut self, clip: f32) {
        self.count_held(|held| held.header.rule = held.header.rule.clipped(clip));
    }

    /// Accepts the held steps as skipped: the trainers have agreed that they change nothing.
    pub fn skip(&mut self) {
        self.count_held(|held| {
            (held.header.rule, held.header.payload_bytes) = (Rule::None, 0);
            held.gradient = Gradient::nothing();
        });
    }

    fn count_held(&mut self, change: impl Fn(&mut Held)) {
        for unit in 0..self.units.len() {
            let Some(mut held) = self.units[unit].held.take() else {
                continue;
            };
            self.unhold(unit, held.header.payload_bytes);
            change(&mut held);
            self.push(unit, &held.header, held.checksum, held.gradient);
        }
    }

    fn discard_of(&mut self, bytes: &[u8]) {
        let id = bytes.get(8..16).and_then(|id| id.first_chunk()).map(|id| u64::from_le_bytes(*id));
        if let Some(&unit) = id.and_then(|id| self.places.get(&id)) {
            self.discard_unit(unit);
        }
    }

    fn discard_unit(&mut self, unit: usize) {
        if let Some(held) = self.units[unit].held.take() {
            self.unhold(unit, held.header.payload_bytes);
        }
    }

    fn unhold(&mut self, unit: usize, payload_bytes: usize) {
        self.units[unit].bytes -= cost(payload_bytes);
        self.bytes -= cost(payload_bytes);
    }

    fn hold_back(&mut self, unit: usize, header: &Header, checksum: u64, gradient: Gradient) {
        let bytes = cost(header.payload_bytes);
        let own = &mut self.units[unit];
        own.held = Some(Held { header: *header, checksum, gradient });
        own.bytes += bytes;
        self.bytes += bytes;
    }

    fn accept_for(
        &mut self,
        unit: usize,
        record: &Record<'_>,
        pool: &dyn Parallel,
        keep: Keep,
    ) -> std::result::Result<Accepted, Fault> {
        let Header { kind, step, elements, payload_bytes, .. } = record.header;
        let own = &self.units[unit];
        let (expected, got) = match kind {
            Kind::FullState => (own.state_bytes, payload_bytes),
            _ => (own.elements, elements),
        };
        if expected != got {
            // A size that does not fit may be the result of damage.
            record.verify(pool)?;
            return Err(Fault::WrongSize { expected, got });
        }
        if kind == Kind::FullState {
            return self.accept_state(unit, record, pool);
        }
        if kind == Kind::Proof {
            return self.accept_proof(unit, record, pool);
        }
        let follows = own.version.is_some() && !own.broken;
        let next = own.newest.saturating_add(1);
        if !follows || step != next {
            record.verify(pool)?;
            return match step {
                _ if !follows => Err(Fault::NoState { step }),
                _ if step > next => Err(Fault::Gap { expected: next, got: step }),
                _ if step == own.newest && record.checksum() == own.checksum => {
                    Ok(Accepted::Duplicate { unit })
                }
                _ => Err(Fault::Reordered { expected: next, got: step }),
            };
        }
        if self.bytes + cost(payload_bytes) > self.limit_bytes {
            return Ok(Accepted::ApplyNow { unit });
        }
        let gradient = Gradient::store(record, pool)?;
        keep(self, unit, &record.header, record.checksum(), gradient);
        Ok(Accepted::Logged { unit })
    }

    fn accept_state(
        &mut self,
        unit: usize,
        record: &Record<'_>,
        pool: &dyn Parallel,
    ) -> std::result::Result<Accepted, Fault> {
        let digest = record.verify(pool)?;
        self.begin(unit, record.header.step);
        self.units[unit].checksum = record.checksum();
        Ok(Accepted::State { unit, digest })
    }

    fn accept_proof(
        &mut self,
        unit: usize,
        record: &Record<'_>,
        pool: &dyn Parallel,
    ) -> std::result::Result<Accepted, Fault> {
        record.verify(pool)?;
        let digest = record.payload.first_chunk::<PROOF_BYTES>().map(|bytes| u64::from_le_bytes(*bytes));
        let own = &mut self.units[unit];
        let step = record.header.step;
        let is_new = own.proofs.back().is_none_or(|&(last, _)| last < step);
        // If a record is missing, the full state is sent again, which has its own digest.
        if let Some(digest) = digest.filter(|_| own.version.is_some() && step == own.newest && is_new) {
            own.proofs.push_back((step, digest));
        }
        Ok(Accepted::Proof { unit })
    }

    /// Returns the trainer's digest of a unit's state at its current version; once, if the trainer sent one.
    pub fn proof(&mut self, unit: usize) -> Option<u64> {
        let own = &mut self.units[unit];
        let version = own.version?;
        while own.proofs.front().is_some_and(|&(step, _)| step < version) {
            own.proofs.pop_front();
        }
        let is_due = own.proofs.front().is_some_and(|&(step, _)| step == version);
        is_due.then(|| own.proofs.pop_front()).flatten().map(|(_, digest)| digest)
    }

    /// Records that the latest full state is installed: the log continues from it.
    pub fn installed(&mut self, unit: usize) {
        let own = &mut self.units[unit];
        (own.version, own.broken) = (Some(own.newest), false);
    }

    /// A log whose first unit has a state, and one logged step after it.
    #[cfg(test)]
    pub(super) fn start_with(&mut self, entry: Entry) {
        let own = &mut self.units[0];
        (own.version, own.newest, own.bytes) = (Some(0), 1, entry.bytes());
        self.bytes = own.bytes;
        own.entries.push_back(entry);
    }

    fn clear(&mut self, unit: usize) {
        let own = &mut self.units[unit];
        own.entries.clear();
        own.proofs.clear();
        own.held = None;
        own.epoch += 1;
        self.bytes -= own.bytes;
        own.bytes = 0;
    }

    fn push(&mut self, unit: usize, header: &Header, checksum: u64, gradient: Gradient) {
        let own = &mut self.units[unit];
        (own.newest, own.checksum) = (header.step, checksum);
        if own.entries.back_mut().is_some_and(|last| last.counts(header, &gradient)) {
            return;
        }
        let entry = Entry::new(header, gradient);
        let bytes = entry.bytes();
        own.entries.push_back(entry);
        own.bytes += bytes;
        self.bytes += bytes;
    }

    /// Takes steps of a unit from the front: at most `max_steps` that change something, none after the trainer's step
    /// `until`, and none after one for which the trainer sent a digest. None if there are none. A unit has one batch at
    /// a time, until [`Log::applied`]; [`Batch::is_intact`] says whether it may be used.
    pub fn take(&mut self, unit: usize, max_steps: usize, until: u64, pool: &dyn Parallel) -> Option<Batch> {
        let own = &mut self.units[unit];
        let start = own.version?;
        let proven = own.proofs.iter().map(|&(step, _)| step).find(|&step| step > start);
        let until = until.min(proven.unwrap_or(u64::MAX));
        let mut batch = Batch::from(start, own.epoch);
        while let Some(entry) = own.entries.front_mut() {
            batch.are_numbers_intact &= entry.is_intact();
            let rule = *entry.rule();
            let row = rule.as_slice();
            let room = if row.is_empty() { u64::MAX } else { (max_steps - batch.gradients.len()) as u64 };
            let other_rule = !row.is_empty()
                && !batch.numbers.is_empty()
                && batch.numbers.len() != row.len() * batch.gradients.len();
            let count = entry.count().min(room).min(until.saturating_sub(batch.version));
            if count == 0 || other_rule {
                break;
            }
            batch.version += count;
            let bytes = entry.bytes();
            let t = entry.advance(count);
            if !row.is_empty() {
                batch.t = Some(t);
            }
            for _ in 0..if row.is_empty() { 0 } else { count } {
                let taken = entry.take(own.elements, pool);
                batch.numbers.extend_from_slice(row);
                batch.gradients.push(taken.gradient);
                batch.digests.push(taken.digest);
            }
            if entry.count() == 0 {
                batch.bytes += bytes;
                own.bytes -= bytes;
                own.entries.pop_front();
            }
        }
        batch.has_proof = proven == Some(batch.version);
        (batch.version > start).then_some(batch)
    }

    /// Records that a batch was applied: the state has the batch's version and its memory is free. Returns false if a
    /// full state arrived meanwhile.
    pub fn applied(&mut self, unit: usize, epoch: u64, version: u64, bytes: usize) -> bool {
        self.bytes = self.bytes.saturating_sub(bytes);
        let own = &mut self.units[unit];
        if own.epoch != epoch || own.version.is_none() {
            return false;
        }
        own.version = Some(version);
        true
    }
}
