//! Records of many units, in order, in bounded memory, until their steps are repeated.
//!
//! ```text
//! version of the state ─┬─ entry │ entry │ entry ─┬─ newest record      take: some entries from the front, as one batch
//!                       └── steps that are logged ┘                     apply_now: no room for one more
//! ```
//!
//! Steps of zero gradients, and steps in which nothing happened, take no memory but for their numbers; those in a row that
//! are the same are one entry.

use super::entry::{self, Entry, Gradient, cost};
use super::record::{Fault, Header, Kind, PROOF_BYTES, Record, Rule};
use crate::cpu::Parallel;
use crate::ensure;
use crate::error::Result;
use std::collections::{BTreeMap, VecDeque};

pub use super::entry::Stored;

/// Function that keeps the step of a record: unit, header, checksum, gradient.
type Keep = fn(&mut Log, usize, &Header, u64, Gradient);

/// Units, and what is logged of each.
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
    /// Number of full states that came: entries of an earlier one are worth nothing.
    epoch: u64,
    /// The version of the state; none before the first one.
    version: Option<u64>,
    newest: u64,
    /// Checksum of the newest record, to tell it from another one of the same step.
    checksum: u64,
    /// A record was lost: what is logged holds, but nothing can follow it.
    broken: bool,
    entries: VecDeque<Entry>,
    /// The step after the newest, which the trainers have not agreed on yet.
    held: Option<Held>,
    /// Steps that are not behind the state's, and the trainer's digests of the state after them.
    proofs: VecDeque<(u64, u64)>,
    bytes: usize,
}

/// A complete step that the vote may still refuse.
#[derive(Debug)]
struct Held {
    header: Header,
    checksum: u64,
    gradient: Gradient,
}

/// Fate of a record.
#[derive(Debug, PartialEq)]
pub enum Accepted {
    /// It is logged.
    Logged {
        /// Place of the record's unit.
        unit: usize,
    },
    /// It was there already.
    Duplicate {
        /// Place of the record's unit.
        unit: usize,
    },
    /// There is no room for it: apply some of what is logged, then offer it again.
    ApplyNow {
        /// Place of the record's unit.
        unit: usize,
    },
    /// It has the trainer's digest of the state after the newest step; see [`Log::proof`].
    Proof {
        /// Place of the record's unit.
        unit: usize,
    },
    /// It is the unit's full state: replace the unit's by it, then call [`Log::installed`].
    State {
        /// Place of the record's unit.
        unit: usize,
        /// Digest of the state, which is the record's payload: [`state_digest`](super::state_digest).
        digest: u64,
    },
}

/// Steps of a unit, to be applied in one pass.
#[derive(Debug)]
pub struct Batch {
    /// For [`Log::applied`].
    pub epoch: u64,
    /// The unit's version after the batch.
    pub version: u64,
    /// The unit's own count of steps after it; none where it took none in the batch.
    pub t: Option<u64>,
    /// Numbers of the steps, all of one optimizer, one after the other; empty where nothing changes.
    pub numbers: Vec<f32>,
    /// A gradient for each; none for zeros.
    pub gradients: Vec<Option<Stored>>,
    /// Bytes that the log counts until [`Log::applied`].
    pub bytes: usize,
    /// The digest that each gradient had when it came; none where there is nothing to compare any more.
    digests: Vec<Option<u64>>,
    /// Whether the counts and numbers are those that came.
    are_numbers_intact: bool,
}

impl Batch {
    fn from(version: u64, epoch: u64) -> Self {
        let (t, numbers, gradients, digests) = (None, Vec::new(), Vec::new(), Vec::new());
        Self { epoch, version, t, numbers, gradients, bytes: 0, digests, are_numbers_intact: true }
    }

    /// Whether all that was logged is what came: no bit has flipped meanwhile.
    pub fn is_intact(&self, pool: &dyn Parallel) -> bool {
        let is_same = |(stored, digest): (&Option<Stored>, &Option<u64>)| match (stored, digest) {
            (Some(stored), Some(digest)) => entry::digest_of(stored, pool) == *digest,
            _ => true,
        };
        self.are_numbers_intact && self.gradients.iter().zip(&self.digests).all(is_same)
    }
}

impl Log {
    /// An empty log of units: digest of the name, elements of the gradient, bytes of the full state.
    ///
    /// # Errors
    /// Two units of one digest, or a limit that has no room for one gradient of the largest unit.
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

    /// Bytes of what is logged or being applied; never above the limit.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of the units; their places are below it.
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

    /// The unit of which most bytes are logged.
    pub fn fullest(&self) -> Option<usize> {
        (0..self.units.len())
            .filter(|&unit| !self.units[unit].entries.is_empty())
            .max_by_key(|&unit| self.units[unit].bytes)
    }

    /// Says that a unit's state is not what the log believes: nothing but a full state is accepted from now on.
    pub fn forget(&mut self, unit: usize) {
        self.clear(unit);
        self.units[unit].version = None;
    }

    /// A unit gets its full state of after a step from elsewhere; then call [`Log::installed`].
    pub fn begin(&mut self, unit: usize, step: u64) {
        self.forget(unit);
        self.units[unit].newest = step;
    }

    /// Takes a record over, or says what is wrong; its unit then waits for the full state.
    ///
    /// # Errors
    /// The fault, and the unit where the record names one that is known.
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

    /// The unit that a damaged record names, if any; it is taken to have lost a record.
    fn named_in(&mut self, bytes: &[u8]) -> Option<usize> {
        let id = bytes.get(8..16)?.first_chunk().map(|id| u64::from_le_bytes(*id))?;
        let unit = *self.places.get(&id)?;
        self.units[unit].broken = true;
        Some(unit)
    }

    /// Like [`Log::accept`], but the step counts only from [`Log::release`] on, which may change its clipping; before
    /// that [`Log::discard`] takes it back. A later record of the same step replaces it.
    ///
    /// # Errors
    /// Those of [`Log::accept`].
    pub fn hold(
        &mut self,
        bytes: &[u8],
        pool: &dyn Parallel,
    ) -> std::result::Result<Accepted, (Option<usize>, Fault)> {
        self.discard_of(bytes);
        self.accept_checked(bytes, pool, Self::hold_back)
    }

    /// The trainers have agreed on the held steps, with gradients multiplied by `clip` before the optimizer saw them.
    pub fn release(&mut self, clip: f32) {
        self.count_held(|held| held.header.rule = held.header.rule.clipped(clip));
    }

    /// The trainers have agreed to leave out the held steps: they count, and change nothing.
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

    /// Drops the held steps: the vote refused them.
    pub fn discard(&mut self) {
        for unit in 0..self.units.len() {
            self.discard_unit(unit);
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
            // A size that does not fit may be a damaged one.
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
        // Where a record is missing the state comes anew, which proves itself.
        if let Some(digest) = digest.filter(|_| own.version.is_some() && step == own.newest && is_new) {
            own.proofs.push_back((step, digest));
        }
        Ok(Accepted::Proof { unit })
    }

    /// The trainer's digest of a unit's state as it is now, at its version; once, and where the trainer sent one.
    pub fn proof(&mut self, unit: usize) -> Option<u64> {
        let own = &mut self.units[unit];
        let version = own.version?;
        while own.proofs.front().is_some_and(|&(step, _)| step < version) {
            own.proofs.pop_front();
        }
        let is_due = own.proofs.front().is_some_and(|&(step, _)| step == version);
        is_due.then(|| own.proofs.pop_front()).flatten().map(|(_, digest)| digest)
    }

    /// Records that the state that came last is in its place: the log continues from it.
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
    /// `until`, and none after one of which the trainer sent a digest. None where there are none. One batch of a unit at a
    /// time, until [`Log::applied`]; [`Batch::is_intact`] says whether it may be used.
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
        (batch.version > start).then_some(batch)
    }

    /// Says that a batch was applied: the state has its version, unless a full state came meanwhile (then false), and its
    /// memory is free.
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
