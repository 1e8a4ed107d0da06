//! The commit protocol: agreement on the members, on each step, and on the state from which all continue after a
//! failure.
//!
//! ```text
//!              ┌──────────────── Lost, in any phase: Drop ◄─────────────────┐
//!              ▼                                                            │
//! Look ─ Ask ─ Quorum ─ Connect ─ Recall ─ (Take) ─ Restore ─ CountLosses ─ Protect ─ Resume
//!  ▲ │          └ Wait, Withdraw, Stop                                                  │
//!  │ └ intact: (Inquire) ─ (Ask, Compare) ─ (Weigh) ────────────────────────────────┐   │
//!  │                                                                                ▼   ▼
//!  └──────────────────────────────── Commit ◄─ Take ◄─ Tally ◄─ Vote ◄─ Gradients ◄─ Step
//! ```
//!
//! [`Protocol`] is pure: [`Event`]s in, [`Command`]s out; no clock, no I/O. Its drivers, `Session` and
//! `PipelineSession`, execute the commands. `tests/protocol_*.rs` explore the states of several members with crashes,
//! freezes and a late Lighthouse. Every test with real processes replays the events that its members recorded.
//!
//! **Vote before update.** A step is taken once all members have voted that their gradients and copies are complete. A
//! member that loses a peer during the vote does not know the result. So the members recall the latest passed votes
//! before they compare states: either no member has taken the step, or all that could take it do.
//!
//! **Commit one vote later.** If a member reported a step at once and died, it might be the only one that knew of it,
//! and the others would repeat it. So a step is reported as committed when the next vote passes: all members have
//! voted, so all have taken the step, and the copies of its state are complete. The last step has a round of its own.
//!
//! **Copies during the next step.** After a recovery, missing copies may be made while the next step computes. The vote
//! on that step confirms that they are complete. Until then all previous copies are kept, and no step is reported. If
//! the recovery gave the state another version than the previous copies have, training waits.
//!
//! **No two partitions continue.** Members report which others they cannot reach when they ask. From these reports all
//! compute the same set: its members reach each other and have the newest state. The others withdraw until they can
//! reach it, and it waits until the Lighthouse names it alone. Nothing happens under a set without all of its members.
//!
//! **An island takes part completely or not at all.** All members leave out incomplete islands before they judge a set,
//! and the others may continue in it. So a member that is left out does not vouch for that set: it cannot know later
//! that nothing happened under it. A newcomer that is left out waits for the rest of its island. A member with state of
//! the job ends, since its island has lost a process.
//!
//! **Several Lighthouses may name several sets.** A partition may leave a Lighthouse on each side. Then only the set
//! with a majority of the last group continues, or with half of it including its lowest id, whichever Lighthouse names
//! it. All others wait and ask one Lighthouse after the other until a majority is together, or until the operator
//! decides who continues.
//!
//! **An intact group waits for no one else.** Its members ask the Lighthouse for newcomers in the background, and none
//! acts on the answer alone: the vote informs all members that one has seen newcomers. Then they ask together between
//! two steps and compare their answers. Unless all have received the same answer, they continue unchanged.
//!
//! **Versions only grow.** A version is a generation and a step. Every agreement has a larger generation than any of
//! its members had. Consecutive agreements share a member or include all members of the last one (see [`judge`]). So no
//! version is given to two different states.

mod agreement;
mod cut;
mod event;
mod island;
mod majority;
mod member;
mod message;
mod version;

pub use agreement::{Agreement, Need, Verdict, judge, without_idle_spares};
pub use cut::reach_each_other;
pub use event::{
    Begun, Command, Event, Island, LastGroup, Participant, Passed, Refused, Standing, Stop, Wait,
};
pub use island::without_incomplete_islands;
pub use member::{MAX_RECOVERIES, Protocol, Settings};
pub use message::{
    Decoded, Message, PROTOCOL, Quarantine, Role, decode_message, encode_ended, encode_lift, encode_message,
    encode_promotion,
};
pub use version::{STEP_BITS, generation_of, step_of, version_of};
