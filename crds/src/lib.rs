//! What users ask for, and what operator, gateway and engine say to each other.
//!
//! Absent here on purpose: any client, any runtime, any clock.

mod base_model;
mod lora_adapter;
mod serving_pool;

pub mod condition;
pub mod names;
pub mod top;
pub mod wire;

pub mod apidoc;
pub mod crdgen;
mod schema;

pub use base_model::{
    AdapterPolicy, AllowedSource, BaseModel, BaseModelSpec, BaseModelStatus, ModelSource, SecretRef, StoreAccess,
    WeightFormat,
};
pub use lora_adapter::{
    AdapterSource, BaseModelRef, KnownRevision, LoraAdapter, LoraAdapterSpec, LoraAdapterStatus, NameClaim,
    PlacementError, PlacementStatus, PoolPlacement, RetiringRevision, SourceFile, SourcePin, Warmth, WarmthFloor,
};
pub use names::{AdapterName, NameError};
pub use serving_pool::{
    AdapterCounts, Backend, Capacity, EngineTemplate, GatewayServiceType, GatewayTemplate, ServingPool,
    ServingPoolSpec, ServingPoolStatus, Upgrade,
};

/// API group of the three kinds.
pub const GROUP: &str = "lorafleet.dev";
/// Their version.
pub const VERSION: &str = "v1alpha1";
